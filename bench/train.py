"""The training loop measured against a bare loop, transformers.Trainer, its own precisions and its checkpoints.

    python -m bench.train [--quick] [--only loop,precision,checkpoint] [--rounds N] [--steps N] [--threads N]

Prints one JSON line a figure. The arms of a round are fresh processes with the same threads, the same first weights
and the same samples in the same order (bench/looping.py); they take turns, one step each, so that whatever else the
machine does meets all alike. A round's ratio is the median over the steps of one arm's step over the other's beside
it; `ratio` is the median of the rounds, `ratio_range` their lowest and highest, `ratio_cpu` the same of CPU seconds.
Where the bare loop's losses are not ours to the bit, the
bench fails: then the two did not do the same work. On a CPU, fp8 is emulated in fp32: its losses are numerics, its
time is the emulation's and says nothing of fp8's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.looping import READY, TURNS
from bench.measure import machine, report, versions

PARTS = ("loop", "precision", "checkpoint")
PACKAGES = ("crosstrain", "torch", "transformers", "accelerate", "torchao", "numpy")
LOOPS = ("bare", "ours", "trainer")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "recipe": "tensorwise"},
    "fp8_delayed": {"precision": "fp8", "recipe": "delayed"},
}
CADENCE = 50
"""Steps between checkpoints when their stall is measured."""
OVERHEAD_LIMIT, STALL_LIMIT = 1.03, 0.05
TRAINER_TOLERANCE = 1e-3
"""Largest relative distance of Trainer's losses from ours: its log rounds them, and its sums run in another order."""
LEARNABLE = 64
"""Ids of the precisions' walks: few enough to be learned in 60 steps, as equal losses of no learning say nothing."""
LAST = 10
"""Steps whose mean loss is an arm's."""

Said = dict[str, Any]
Arms = Mapping[str, tuple[str, Said]]
"""Name to loop and fields of `looping.Work`."""
Go = Callable[[Arms], dict[str, Said]]


def take_turns(arms: Arms) -> dict[str, Said]:
    """Run arms in a fresh process each, one step of each in turn; what they say.

    Raises:
        ChildProcessError: one failed; with the end of what it said.
    """
    with ExitStack() as stack:
        started = {name: stack.enter_context(_start(*arm)) for name, arm in arms.items()}
        found: dict[str, Said] = {}
        for name, process in started.items():
            _until_ready(name, process, found)
        names = list(arms)
        while len(found) < len(names):
            names = names[1:] + names[:1]
            for name in names:
                if name not in found:
                    _say(started[name], "go")
                    _until_ready(name, started[name], found)
        return {name: found[name] for name in arms}


@contextmanager
def _start(loop: str, options: Said) -> Iterator[subprocess.Popen[str]]:
    threads = str(options["threads"])
    variables = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", TURNS: "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.looping", loop, "--options", json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables,
        )  # fmt: skip
        try:
            yield process
        except ChildProcessError as error:
            errors.seek(0)
            raise ChildProcessError(f"{error}:\n{errors.read()[-1500:]}") from None
        finally:
            process.kill()
            process.communicate()


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _until_ready(name: str, process: subprocess.Popen[str], found: dict[str, Said]) -> None:
    """Read on until an arm waits for its turn, or tells its results."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == READY:
            return
        if line.startswith('{"'):
            found[name] = json.loads(line)
            return
    raise ChildProcessError(f"arm {name} ended without a result")


def ratios(of: Said, to: Said, kind: str) -> float:
    """Median over the steps of one arm's over the other's, step by step."""
    return statistics.median(one / other for one, other in zip(of[kind], to[kind], strict=True))


def spread(of: Sequence[Said], to: Sequence[Said]) -> Said:
    """Median and range of the rounds' ratios."""
    wall, cpu = (
        [ratios(one, other, kind) for one, other in zip(of, to, strict=True)]
        for kind in ("step_seconds", "step_cpu_seconds")
    )
    return {
        "ratio": round(statistics.median(wall), 4),
        "ratio_range": [round(min(wall), 4), round(max(wall), 4)],
        "ratio_cpu": round(statistics.median(cpu), 4),
        "ratio_cpu_range": [round(min(cpu), 4), round(max(cpu), 4)],
    }


def gather(arms: Arms, rounds: int, go: Go) -> dict[str, list[Said]]:
    """What each arm says in each of some rounds."""
    said = [go(arms) for _ in range(rounds)]
    return {name: [one[name] for one in said] for name in arms}


def figures(runs: Sequence[Said], tokens: int) -> Said:
    """Speed and memory of an arm over its rounds, `tokens` a step."""
    step = statistics.median(statistics.median(run["step_seconds"]) for run in runs)
    return {
        "step_seconds": round(step, 5),
        "tokens_per_second": round(tokens / step, 1),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "rounds": len(runs),
        "steps_timed": len(runs[0]["step_seconds"]),
    }


def last_loss(run: Said) -> float:
    """Mean loss of a run's last steps."""
    return statistics.fmean(run["losses"][-LAST:])


def distance(one: Said, other: Said) -> float:
    """Largest relative distance of two runs' losses, step by step."""
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def bench_loop(work: Said, rounds: int, tokens: int, go: Go = take_turns) -> None:
    """Our loop against the bare one and Trainer.

    Raises:
        AssertionError: an arm's losses show that it did other work.
    """
    found = gather({name: (name, work) for name in LOOPS}, rounds, go)
    ours = found["ours"]
    for bare, own in zip(found["bare"], ours, strict=True):
        assert bare["losses"] == own["losses"], "the bare loop's losses are not ours: the arms did different work"
    far = max(distance(run, own) for run, own in zip(found["trainer"], ours, strict=True))
    assert far < TRAINER_TOLERANCE, f"Trainer's losses are {far:.2g} from ours: the arms did different work"
    for name, runs in found.items():
        line: Said = {"arm": name, **figures(runs, tokens)}
        if name != "ours":
            line |= {"ours_over_it": spread(ours, runs), "losses_distance": distance(runs[0], ours[0])}
        report(what="loop", load=round(os.getloadavg()[0], 2), **line)
    ratio = spread(ours, found["bare"])["ratio"]
    report(what="loop_overhead", overhead_percent=100 * (ratio - 1), limit_percent=3, passed=ratio <= OVERHEAD_LIMIT)
    ratio = spread(ours, found["trainer"])["ratio"]
    report(what="loop_against_trainer", speedup=1 / ratio, passed=ratio < 1)


def bench_precision(work: Said, rounds: int, tokens: int, go: Go = take_turns) -> None:
    """Each precision over the same weights and samples: losses first, and what the arithmetic cost here."""
    found = gather({name: ("ours", {**work, **chosen}) for name, chosen in PRECISIONS.items()}, rounds, go)
    base = found["fp32"]
    for name, runs in found.items():
        is_emulated = name.startswith("fp8")
        line: Said = {"arm": name, "precision": runs[0]["precision"], "emulated": is_emulated}
        line |= {"last_loss": last_loss(runs[0]), "steps": len(runs[0]["losses"])}
        for other in ("fp32", "bf16"):
            if other != name:
                gap = last_loss(runs[0]) / last_loss(found[other][0]) - 1
                line[f"loss_gap_percent_of_{other}"] = 100 * gap
        cost = figures(runs, tokens) | spread(runs, base)
        report(what="precision", **line, **{"emulation" if is_emulated else "cost": cost})


def bench_checkpoint(work: Said, rounds: int, tokens: int, go: Go = take_turns) -> None:
    """What checkpoints hold a run up, at a cadence of CADENCE steps; the one after the last step is left out."""
    steps = 2 * CADENCE + 20
    runs = gather({"ours": ("ours", {**work, "steps": steps, "checkpoint_every": CADENCE})}, rounds, go)["ours"]
    shares, excesses = [], []
    for run in runs:
        step = statistics.median(run["step_seconds"])
        stalls = run["stalls"][: steps // CADENCE]
        shares.append(statistics.fmean(stalls) / (CADENCE * step))
        excesses.append(excess(run["step_seconds"], steps))
    report(
        what="checkpoint_stall",
        cadence_steps=CADENCE,
        **figures(runs, tokens),
        stall_seconds=statistics.median(stall for run in runs for stall in run["stalls"][: steps // CADENCE]),
        stall_share=statistics.median(shares),
        stall_share_range=[round(min(shares), 5), round(max(shares), 5)],
        slowdown_share=statistics.median(excesses),
        passed=statistics.median(shares) < STALL_LIMIT,
    )


def excess(seconds: Sequence[float], steps: int, after: int = 5) -> float:
    """What steps took above the median from a checkpoint on, for `after` steps, a share of CADENCE steps.

    The stall is in it, and what storing in the background takes from the steps that run beside it.

    Args:
        seconds: Of each timed step; the last one timed is step `steps - 1`.
        steps: Steps of the run.
        after: Steps that storing may reach into.
    """
    middle = statistics.median(seconds)
    shift = steps - 1 - len(seconds)
    saves = range(CADENCE, steps - after, CADENCE)
    sums = [sum(seconds[save - shift - 1 : save - shift - 1 + after]) - after * middle for save in saves]
    return statistics.fmean(sums) / (CADENCE * middle)


def main(arguments: list[str] | None = None) -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under ten minutes on two cores")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run [default: %(default)s]")
    parser.add_argument(
        "--rounds", type=int, help="rounds of each part [default: 5, precision 1, checkpoint 3; quick: 3, 1, 1]"
    )
    parser.add_argument("--steps", type=int, help="steps of each arm [default: 200; quick: 30, precision 60]")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every arm [default: 1]")
    given = parser.parse_args(arguments)
    parts = given.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only {unknown[0]}: choose among {', '.join(PARTS)}")
    work: Said = {"threads": given.threads, "length": 128, "global_batch": 8, "micro_batch": 8, "preset": "tiny"}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report(what="machine", **machine(), versions=versions(PACKAGES), commit=commit, quick=given.quick, work=work)
    tokens = work["length"] * work["global_batch"]
    if "loop" in parts:
        steps = given.steps or (30 if given.quick else 200)
        bench_loop({**work, "steps": steps}, given.rounds or (3 if given.quick else 5), tokens)
    if "precision" in parts:
        steps = given.steps or (60 if given.quick else 200)
        bench_precision({**work, "steps": steps, "vocabulary": LEARNABLE}, given.rounds or 1, tokens)
    if "checkpoint" in parts:
        bench_checkpoint(work, given.rounds or (1 if given.quick else 3), tokens)


if __name__ == "__main__":
    sys.exit(main())
