"""Shuffled documents laid end to end and cut into shards of equal size, each planned first and written alone.

A plan says where in the order a shard begins, so that any shard can be written, or written again, without the
others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crosstrain.components.core.tokens import Ids, PairWriter
from crosstrain.components.shard.splitting import Documents, Members

_DOCUMENTS = 1 << 14
"""Documents looked up at once."""

_IDS = 1 << 22
"""Ids gathered before they are written."""


@dataclass(frozen=True)
class Plan:
    """One shard: the `tokens` ids from `skip` ids into the document at position `first`."""

    stem: str
    first: int
    skip: int
    tokens: int

    @property
    def continues(self) -> bool:
        """Whether the first document began in the shard before."""
        return self.skip > 0


def plan_shards(name: str, members: Members, documents: Documents, shard_tokens: int) -> Iterator[Plan]:
    """Cut a split into shards of `shard_tokens` ids; the last one has what is left."""
    number, before = 0, 0
    for begin in range(0, len(members), _DOCUMENTS):
        lengths = documents.lengths(members.at(begin, begin + _DOCUMENTS))
        ends = before + np.cumsum(lengths)
        while number * shard_tokens < ends[-1]:
            place = int(np.searchsorted(ends, number * shard_tokens, side="right"))
            skip = number * shard_tokens - int(ends[place] - lengths[place])
            size = min(shard_tokens, members.tokens - number * shard_tokens)
            yield Plan(f"{name}-{number:05d}", begin + place, skip, size)
            number += 1
        before = int(ends[-1])


def write_shard(plan: Plan, members: Members, documents: Documents, target: Path) -> None:
    """Write one shard's pair to `target`."""
    with PairWriter(target, documents.pairs[0].dtype) as writer:
        gathered: list[Ids] = []
        size = 0
        for piece in _pieces(plan, members, documents):
            gathered.append(piece)
            size += piece.size
            if size >= _IDS:
                _flush(writer, gathered)
                size = 0
        _flush(writer, gathered)
    assert writer.tokens == plan.tokens, f"{plan.stem}: {writer.tokens} ids instead of {plan.tokens}"


def _pieces(plan: Plan, members: Members, documents: Documents) -> Iterator[Ids]:
    """The documents of a shard, the first and the last as far as they belong to it."""
    left, skip = plan.tokens, plan.skip
    for position in range(plan.first, len(members), _DOCUMENTS):
        for ids in documents.ids(members.at(position, position + _DOCUMENTS)):
            piece = ids[skip : skip + left]
            yield piece
            skip = 0
            left -= piece.size
            if not left:
                return


def _flush(writer: PairWriter, gathered: list[Ids]) -> None:
    if gathered:
        writer.write(np.concatenate(gathered), np.array([piece.size for piece in gathered]))
        gathered.clear()
