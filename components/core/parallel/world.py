"""The processes that train together: joined as torchrun started them, left before they end.

What the ranks tell one another beside tensors of the model (counts, losses, verdicts) goes over a group of its own on
the CPU, and checkpoints over a second one, because they are written in the background. In one process nothing is
joined and every call is free.
"""

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

MEET_SECONDS = 600.0
"""How long ranks wait for one another at their start."""


@dataclass(frozen=True)
class World:
    """One process among those that train a model together."""

    rank: int = 0
    size: int = 1
    talk: Any = None
    """Process group on the CPU for what the ranks agree on; None in one process."""
    checkpoints: Any = None
    """Process group on the CPU for the thread that writes checkpoints; None in one process."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and reports."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of the ranks' values, the same bits on every rank; in one process the values as they are."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total, group=self.talk)
        return [float(value) for value in total]

    def share(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank; it must pickle."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.talk)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in their order; they must pickle."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.talk)
        return found

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            distributed.barrier(group=self.talk)


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "neuron": "cpu:gloo,neuron:neuron"}
"""Kind of device to the backend of the group of all processes."""

ALONE = World()
"""A process that trains by itself."""


def world_size() -> int:
    """Processes that the launcher started, of which this is one.

    Raises:
        ValueError: it says several, and not how to find them.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and (missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]):
        raise ValueError(
            f"WORLD_SIZE is {size}, and {missing[0]} is not set: several processes are started by torchrun, or by "
            "run_on.processes_per_node"
        )
    return size


def gathered(weights: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as rank 0 gets them: all there."""
    for name, item in weights:
        assert item is not None, f"{name} is asked for on a rank that does not gather it"
        yield name, item


def fresh_store(shared: Any, rank: int, size: int, timeout: float = MEET_SECONDS) -> Any:
    """The part of a launcher's store that belongs to this start of the ranks.

    torchrun keeps one store over its restarts, with the addresses that killed ranks left in it, and a rank that
    reads one of those before its successor writes never connects. So each rank leaves a word of its own, and rank 0
    offers all of them with a name for the new part until every rank has found its word in the offer.

    Args:
        shared: The launcher's store.
        rank: Of this process.
        size: Processes.
        timeout: Seconds to wait for the others.

    Raises:
        TimeoutError: some rank did not come.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    shared.set(f"word/{rank}", word)
    others = range(1, size)
    while time.monotonic() < deadline:
        if rank == 0:
            words = [item.decode() for item in shared.multi_get([f"word/{other}" for other in others])]
            shared.set("offer", json.dumps([word, *words]))
            if shared.check([f"{word}/{other}" for other in others]):
                return distributed.PrefixStore(word, shared)
        else:
            offer = json.loads(shared.get("offer"))
            if len(offer) == size and offer[rank] == word:
                shared.set(f"{offer[0]}/{rank}", "")
                return distributed.PrefixStore(offer[0], shared)
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank} waited {timeout:.0f} s for the other {size - 1}; look at the logs of those")


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Join the processes that the launcher started with this one, for the length of the block.

    Args:
        device: Where this process computes.
    """
    size = world_size()
    if size == 1:
        yield ALONE
        return
    shared, rank, _ = next(distributed.rendezvous("env://"))
    store = fresh_store(shared, rank, size)
    distributed.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size)
    try:
        yield World(
            rank=distributed.get_rank(),
            size=size,
            talk=distributed.new_group(backend="gloo"),
            checkpoints=distributed.new_group(backend="gloo"),
        )
    finally:
        distributed.destroy_process_group()
