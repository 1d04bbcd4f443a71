"""The training bench's own logic: equal work in every arm, turns, ratios, and what makes it fail."""

import json

import numpy as np
import pytest

from bench import looping, train

WORK = looping.Work(
    steps=6, preset="debug", vocabulary=64, length=16, global_batch=4, micro_batch=2, checkpoint_every=2
)


def said(**given):
    return {
        "losses": [3.0, 2.0], "step_seconds": [1.0, 2.0, 3.0], "step_cpu_seconds": [1.0], "peak_bytes": 7,
        "precision": "x", "stalls": [], **given,
    }  # fmt: skip


def each(arm):
    """A stand-in for arms that take turns: `arm(loop, work)` says what one would."""
    return lambda arms: {name: arm(*given) for name, given in arms.items()}


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_arm_does_the_same_work():
    bare, ours, trainer = (looping.run(arm, WORK) for arm in ("bare", "ours", "trainer"))
    assert len(ours["losses"]) == 6 and bare["losses"] == ours["losses"] and bare["norms"] == ours["norms"]
    assert train.distance(trainer, ours) < train.TRAINER_TOLERANCE
    assert len(set(ours["losses"])) == 6, "losses that do not move would be equal of any work"
    assert len(ours["stalls"]) == 3 and ours["precision"] == "fp32"
    for said in (bare, ours):
        assert len(said["step_seconds"]) == len(said["step_cpu_seconds"]) == 6 - 1 - looping.WARM_UP


def test_a_step_lasts_from_its_first_sample_to_the_first_of_the_next():
    data = looping.Clocked(WORK.samples(), 2, [5, 3, 4, 0])
    read = [data[index].input_ids for index in range(4)]
    assert np.array_equal(read[1], WORK.samples()[3].input_ids) and len(data.asked) == len(data.given) == 2
    data.asked = [(0.0, 0.0), (3.0, 1.0), (4.5, 1.5)]
    data.given = [(0.5, 0.0), (3.5, 1.0), (9.0, 1.5)]
    assert data.steps() == ([2.5, 1.0], [1.0, 0.5])


def test_arms_take_turns_step_by_step_in_processes_of_their_own():
    work = {"steps": 5, "preset": "debug", "vocabulary": 64, "length": 8, "global_batch": 1, "micro_batch": 1}
    found = train.take_turns({name: (name, {**work, "threads": 1}) for name in ("bare", "ours")})
    assert found["bare"]["losses"] == found["ours"]["losses"] and len(found["ours"]["step_seconds"]) == 1


def test_an_arm_that_fails_says_why():
    with pytest.raises(ChildProcessError, match=r"(?s)arm bare ended.*no_such_preset"):
        train.take_turns({"bare": ("bare", {"preset": "no_such_preset", "threads": 1})})


def test_a_ratio_pairs_steps_and_rounds():
    ours = [said(step_seconds=[2.0, 20.0, 90.0], step_cpu_seconds=[3.0]), said(step_seconds=[8.0])]
    bare = [said(step_seconds=[1.0, 10.0, 1.0]), said(step_seconds=[8.0])]
    found = train.spread(ours, bare)
    assert (found["ratio"], found["ratio_range"]) == (1.5, [1.0, 2.0])
    assert (found["ratio_cpu"], found["ratio_cpu_range"]) == (2.0, [1.0, 3.0])


def test_the_loop_part_says_overhead_and_speedup(capsys):
    steps = {"bare": 1.0, "ours": 1.02, "trainer": 1.53}
    train.bench_loop({}, 2, 102, each(lambda name, work: said(step_seconds=[steps[name]])))
    *arms, overhead, trainer = lines(capsys)
    assert [line["arm"] for line in arms] == ["bare", "ours", "trainer"]
    assert arms[1]["tokens_per_second"] == 100 and arms[2]["ours_over_it"]["ratio"] == pytest.approx(2 / 3, rel=1e-4)
    assert overhead["overhead_percent"] == 2 and overhead["passed"]
    assert trainer["speedup"] == pytest.approx(1.5, rel=1e-3) and trainer["passed"]
    steps["bare"], steps["trainer"] = 0.98, 1.0
    train.bench_loop({}, 1, 102, each(lambda name, work: said(step_seconds=[steps[name]])))
    assert [line["passed"] for line in lines(capsys)[-2:]] == [False, False]


@pytest.mark.parametrize(("arm", "losses"), [("bare", [3.0, 2.0000001]), ("trainer", [3.0, 2.01])])
def test_an_arm_that_did_other_work_fails_the_bench(arm, losses):
    with pytest.raises(AssertionError, match="did different work"):
        train.bench_loop({}, 1, 1, each(lambda name, work: said(losses=losses) if name == arm else said()))


def test_the_time_of_emulated_fp8_is_called_the_emulations(capsys):
    losses = {"fp32": [2.0], "bf16": [2.1], "fp8": [2.2]}
    train.bench_precision({}, 1, 1, each(lambda name, work: said(losses=losses[work["precision"]])))
    fp32, bf16, fp8, delayed = lines(capsys)
    assert "cost" in fp32 and "cost" in bf16 and not fp32["emulated"]
    for line in (fp8, delayed):
        assert line["emulated"] and "cost" not in line and line["emulation"]["ratio"] == 1
    assert fp8["loss_gap_percent_of_fp32"] == pytest.approx(10) and "loss_gap_percent_of_fp32" not in fp32


def test_a_stall_is_a_share_of_the_steps_between_checkpoints(capsys):
    seconds = [0.1] * 116  # steps 4 to 119 of 120
    seconds[50 - 4] = seconds[100 - 4] = 0.3  # the steps that checkpoints followed
    seen = []

    def arm(name, work):
        seen.append((name, work["steps"], work["checkpoint_every"]))
        return said(step_seconds=seconds, stalls=[0.1, 0.2, 9.0])

    train.bench_checkpoint({}, 1, 1, each(arm))
    (line,) = lines(capsys)
    assert seen == [("ours", 120, 50)]
    assert line["stall_share"] == pytest.approx(0.15 / 5) and line["passed"], "the last save is no stall"
    assert line["slowdown_share"] == pytest.approx(0.2 / 5)


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["--only", "loops"])
    assert "choose among loop, precision, checkpoint" in capsys.readouterr().err
