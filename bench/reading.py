"""Training readers: samples a second at one sequence length, in one process, from disk and from object storage.

    python -m bench.reading ARM --tokens FILE --shards URI --copies URI --length L --samples N

`--tokens` is a flat file of uint16 ids (what memmap reads), `--shards` our shards artifact of the same ids,
`--copies` where litdata's and mosaicml-streaming's own copies lie (made by `python -m bench.reading make`). Every arm
goes through the samples in shuffled order, in batches of 8, until N samples are read; start-up and first opening are
outside the measured time on disk, inside it from S3, where fetching is what a reader does.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 8


class Task(argparse.Namespace):
    """What an arm is to do."""

    tokens: Path
    shards: str
    copies: str
    length: int
    samples: int


def crosstrain(task: Task) -> Iterator[int]:
    """ShardDataset: ids, labels and positions, in the order of a batch plan; every shard verified on first use."""
    from crosstrain.components.core.artifact import Artifact
    from crosstrain.components.core.data import BatchPlan, ShardDataset

    dataset = ShardDataset(Artifact.open(task.shards, "shards"), "train")
    plan = BatchPlan(len(dataset), BATCH, seed=0)
    step = 0
    while True:
        batch = dataset.batch(plan.indices(step))
        step += 1
        yield len(batch["input_ids"])


def _memmap_loader(task: Task, workers: int) -> Iterator[int]:
    import torch
    from torch.utils.data import DataLoader, Dataset

    ids = np.memmap(task.tokens, np.uint16, "r")

    class Samples(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return ids.size // task.length

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(ids[index * task.length : (index + 1) * task.length].astype(np.int64))

    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield len(batch)


def memmap_0(task: Task) -> Iterator[int]:
    """DataLoader over a memmap in this process: ids alone, nothing verified."""
    return _memmap_loader(task, 0)


def memmap_2(task: Task) -> Iterator[int]:
    """The same with two worker processes."""
    return _memmap_loader(task, 2)


def litdata(task: Task) -> Iterator[int]:
    """The litdata package in this process."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # otherwise it refuses a server without TLS
    remote = task.copies.startswith("s3://")
    options = {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}} if remote else {}
    with tempfile.TemporaryDirectory() as cache:
        source = StreamingDataset(
            f"{task.copies}/litdata",
            item_loader=TokensLoader(block_size=task.length),
            shuffle=True,
            cache_dir=cache if remote else None,
            **options,
        )
        loader = StreamingDataLoader(source, batch_size=BATCH, num_workers=0)
        while True:
            for batch in loader:
                yield len(batch)


def mosaic(task: Task) -> Iterator[int]:
    """mosaicml-streaming in this process, hashes validated."""
    from torch.utils.data import DataLoader

    StreamingDataset = _import_streaming().StreamingDataset

    remote = task.copies.startswith("s3://")
    with tempfile.TemporaryDirectory() as cache:
        source = StreamingDataset(
            remote=f"{task.copies}/mosaic" if remote else None,
            local=cache if remote else f"{task.copies}/mosaic",
            shuffle=True,
            batch_size=BATCH,
            validate_hash="sha1" if remote else None,
        )
        loader = DataLoader(source, BATCH)
        while True:
            for batch in loader:
                yield len(batch["ids"])


def _import_streaming() -> Any:
    """mosaicml-streaming, which imports torchvision for its image data sets alone.

    The torchvision of the plain package index is built for CUDA and fails beside a torch for CPUs; empty modules stand
    in for it then.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in (
            "torchvision",
            "torchvision.datasets",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ):
            module = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            vars(module).update(VisionDataset=object, to_tensor=None)
            sys.modules[name] = module
    return importlib.import_module("streaming")


def make(task: Task) -> None:
    """Write the ids as litdata and as mosaicml-streaming keep them, 64 MiB a chunk."""
    from litdata import TokensLoader, optimize

    ids = np.memmap(task.tokens, np.uint16, "r")
    count = ids.size // task.length
    spans = [
        (str(task.tokens), begin * task.length, min(begin + 1024, count) * task.length)
        for begin in range(0, count, 1024)
    ]
    optimize(
        fn=_span,
        inputs=spans,
        output_dir=f"{task.copies}/litdata",
        chunk_size=task.length * 8192,
        item_loader=TokensLoader(),
        num_workers=1,
    )
    with _import_streaming().MDSWriter(
        out=f"{task.copies}/mosaic", columns={"ids": "ndarray:uint16"}, size_limit=1 << 25, hashes=["sha1"]
    ) as out:
        for number in range(count):
            out.write({"ids": np.array(ids[number * task.length : (number + 1) * task.length])})


def _span(span: tuple[str, int, int]) -> Iterator[Any]:
    import torch

    path, begin, end = span
    yield torch.from_numpy(np.memmap(path, np.uint16, "r")[begin:end].astype(np.int32))


ARMS: dict[str, Callable[[Task], Iterator[int]]] = {
    function.__name__: function for function in (crosstrain, memmap_0, memmap_2, litdata, mosaic)
}


def main() -> None:
    """Run one arm, or make the copies."""
    parser = argparse.ArgumentParser(prog="python -m bench.reading", description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=[*ARMS, "make"])
    parser.add_argument("--tokens", type=Path, required=True)
    for name in ("shards", "copies"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("length", "samples"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args(namespace=Task())
    if task.arm == "make":
        shutil.rmtree(task.copies, ignore_errors=True)
        make(task)
        return
    began, cpu = time.monotonic(), time.process_time()
    batches = ARMS[task.arm](task)
    if not task.shards.startswith("s3://"):
        next(batches)
        began, cpu = time.monotonic(), time.process_time()
    done = sum(islice(batches, task.samples // BATCH))
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    print(json.dumps({"samples": done, "seconds": seconds, "cpu_seconds": used}))
    os._exit(0) if task.arm in ("litdata", "mosaic") else None


if __name__ == "__main__":
    main()
