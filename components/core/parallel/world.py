"""The processes that train together: joined as torchrun started them, left before they end.

What the ranks tell one another beside tensors of the model (counts, losses, verdicts) goes over a group of its own on
the CPU, and checkpoints over a second one, because they are written in the background. In one process nothing is
joined and every call is free.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


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
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(
            rank=distributed.get_rank(),
            size=size,
            talk=distributed.new_group(backend="gloo"),
            checkpoints=distributed.new_group(backend="gloo"),
        )
    finally:
        distributed.destroy_process_group()
