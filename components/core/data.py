"""Training data as training sees it: samples of fixed length out of shards, in an order that is pure arithmetic.

Which sample comes when is a function of (samples, seed, step, rank, world size) and of nothing else, so a run
resumes at any step with any number of ranks and sees the same samples. Sample i of a split is the ids
[i*L, (i+1)*L) of the split's shards laid end to end. Left out on purpose: worker processes (a memory map
in process is faster than any pipe) and tensors (torch is the trainer's).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import Split
from crosstrain.components.core.shard_cache import ShardCache
from crosstrain.components.core.tokens import Ids

IGNORE = -100
"""Label of a position that carries no loss."""

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sequence of L ids, packed from whole and cut documents."""

    input_ids: Int64s
    """[L]"""
    labels: Int64s
    """[L]: labels[t] is the id at t (the loss does the shift), and IGNORE for pads and wherever a document,
    or a piece of one, begins: nothing before it may be asked to predict it."""
    position_ids: Int64s
    """[L]: restart at 0 at each document; passed without an attention mask they keep documents apart."""
    continues: bool = False
    """Whether the first id goes on with the document that the sample before ends in."""


class ShardDataset:
    """Random access to the samples of one split of a shards artifact; shards are verified and mapped on first use.

    Out of object storage the shards are fetched in the background from the first sample on, as a shuffled epoch needs
    all of them.
    """

    def __init__(self, artifact: Artifact, split: Literal["train", "validation"], cache_bytes: int = 0) -> None:
        """Samples of a split.

        Args:
            artifact: Shards.
            split: Which part of them.
            cache_bytes: Local disk for shards out of object storage, the ones used longest ago go first; 0: no limit.

        Raises:
            ValueError: the artifact holds no shards, or the cache not one of them.
        """
        facts = artifact.facts
        if facts.kind != "shards":
            raise ValueError(f"{artifact.uri}: this is a {facts.kind} artifact, and a shards artifact is wanted")
        self.split: Split = getattr(facts, split)
        self.sequence_length: int = facts.sequence_length
        self.vocab_size: int = facts.tokenizer.vocab_size
        self._cache = ShardCache(artifact, self.split.shards, cache_bytes)
        self._pad: int = facts.tokenizer.eos_id
        self._ends: list[int] = np.cumsum(np.array(self.split.shard_tokens, np.int64)).tolist()
        self._fetching_ahead = False

    def __len__(self) -> int:
        """Number of samples; the last one may be short, and is then padded."""
        return self.split.samples

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, with 0 <= index < len(self)."""
        ids, labels, positions, continues = self._gather([index])
        return Sample(ids[0], labels[0], positions[0], continues[0])

    def batch(self, indices: Sequence[int] | Int64s) -> dict[str, Int64s]:
        """What `collate` makes of these samples, each array built in one go: `input_ids` … [indices, L]."""
        ids, labels, positions, _ = self._gather([int(index) for index in indices])
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def _gather(self, indices: list[int]) -> tuple[Int64s, Int64s, Int64s, list[bool]]:
        """Ids, labels, positions [indices, L], and whether each sample goes on with the document before it."""
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {len(self)}")
        if not self._fetching_ahead:
            self._fetching_ahead = True
            self._cache.prefetch(range(len(self.split.shards)))
        length, total = self.sequence_length, self.split.tokens
        ids = np.empty((len(indices), length), np.int64)
        found, continues = [np.arange(0, ids.size, length)], []
        pads = np.zeros(0, np.int64)
        for row, index in enumerate(indices):
            starts = self._fill(ids[row], index * length, row * length, found)
            continues.append(not starts)
            if (real := total - index * length) < length:
                ids[row, real:] = self._pad
                pads = np.concatenate([pads, np.arange(row * length + real, (row + 1) * length)])
                found.append(pads[real - length :][:1])
        begins = np.unique(np.concatenate(found))
        positions = np.repeat(begins, np.diff(begins, append=ids.size))
        np.subtract(_places(ids.size), positions, out=positions)
        labels = ids.flatten()
        labels[begins] = IGNORE
        labels[pads] = IGNORE
        return ids, labels.reshape(ids.shape), positions.reshape(ids.shape), continues

    def _fill(self, row: Int64s, begin: int, place: int, found: list[Int64s]) -> bool:
        """Copy the ids from `begin` on into a row, and note where documents begin as places of the batch.

        Returns:
            Whether one begins with the first id.
        """
        at, end, first = begin, min(begin + len(row), self.split.tokens), False
        while at < end:
            shard = bisect_right(self._ends, at)
            base = self._ends[shard] - self.split.shard_tokens[shard]
            stop = min(end, self._ends[shard])
            values, starts = self._open(shard)
            row[at - begin : stop - begin] = values[at - base : stop - base]
            low, high = starts.searchsorted((at - base, stop - base))
            if high > low:
                places = starts[low:high] + (place + base - begin)
                first = first or bool(places[0] == place)
                found.append(places)
            at = stop
        return first

    def _open(self, shard: int) -> tuple[Ids, Int64s]:
        """A shard's ids, and where documents begin in it (the rest of one begun before is not a beginning)."""
        pair = self._cache[shard]
        return pair.ids, pair.starts[1:] if self.split.continues[shard] else pair.starts


@lru_cache(maxsize=4)
def _places(size: int) -> Int64s:
    return np.arange(size)


def collate(samples: Sequence[Sample]) -> dict[str, Int64s]:
    """Samples as one batch: `input_ids`, `labels`, `position_ids`, each [B, L]."""
    return {
        "input_ids": np.stack([sample.input_ids for sample in samples]),
        "labels": np.stack([sample.labels for sample in samples]),
        "position_ids": np.stack([sample.position_ids for sample in samples]),
    }


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size-1, computed at any position without a table.

    An alternating Feistel network over the smallest power of two that holds `size`, walked until the value
    falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains": cycle walking).
    """

    size: int
    keys: tuple[int, ...]
    """One 64-bit key a round."""

    def __call__(self, positions: NDArray) -> Int64s:
        """The values at `positions`, which lie in 0 … size-1; any shape."""
        bits = max(2, (self.size - 1).bit_length())
        values = np.array(positions, np.uint64)
        outside = np.ones(values.shape, np.bool_)
        while outside.any():
            values[outside] = self._rounds(values[outside], bits)
            outside = values >= self.size
        return values.astype(np.int64)

    def _rounds(self, values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        low_bits = np.uint64(bits // 2)
        low_mask = np.uint64((1 << (bits // 2)) - 1)
        high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        high, low = values >> low_bits, values & low_mask
        for number, key in enumerate(self.keys):
            if number % 2:
                low = low ^ (_mix(high, key) & low_mask)
            else:
                high = high ^ (_mix(low, key) & high_mask)
        return (high << low_bits) | low


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A keyed 64-bit hash: the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(size: int, *name: int | str) -> Permutation:
    """The permutation of 0 … size-1 that belongs to a name, the same on every machine and version."""
    text = "/".join(str(part) for part in name)
    keys = tuple(
        int.from_bytes(hashlib.blake2b(f"{text}/{number}".encode(), digest_size=8).digest(), "little")
        for number in range(_ROUNDS)
    )
    return Permutation(size, keys)


_ROUNDS = 8


def epoch_order(samples: int, seed: int, epoch: int) -> Permutation:
    """The order of one epoch: call it with positions in the epoch, get sample indices."""
    return permutation(samples, "epoch", seed, epoch)


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each optimizer step takes, and which of them are this rank's.

    Position p = step * global_batch + r of the endless stream is position p % samples of epoch p // samples;
    rank k of `world` takes r = k, k + world, … A batch may hold the end of one epoch and the start of the next.
    """

    samples: int
    global_batch: int
    """Samples an optimizer step, all ranks together."""
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.samples < self.world:
            raise ValueError(
                f"{self.samples} samples for {self.world} ranks: give more data, a smaller sequence_length "
                "or fewer ranks"
            )
        if self.global_batch < 1 or self.global_batch % self.world:
            raise ValueError(
                f"global batch size {self.global_batch} does not divide over {self.world} ranks; "
                f"use {max(1, round(self.global_batch / self.world)) * self.world}"
            )

    def indices(self, step: int) -> Int64s:
        """The samples that this rank takes at optimizer step `step` (from 0); [global_batch // world]."""
        begin = step * self.global_batch
        return _stream(self.samples, self.seed, begin, begin + self.global_batch)[self.rank :: self.world]


def _stream(samples: int, seed: int, begin: int, end: int) -> Int64s:
    """The samples at positions [begin, end) of the endless stream of epochs."""
    pieces = []
    while begin < end:
        epoch, place = divmod(begin, samples)
        number, offset = divmod(place, _BLOCK)
        piece = _order_block(samples, seed, epoch, number)[offset : offset + end - begin]
        pieces.append(piece)
        begin += piece.size
    return np.concatenate(pieces)


@lru_cache(maxsize=8)
def _order_block(samples: int, seed: int, epoch: int, number: int) -> Int64s:
    """Part of an epoch's order: many positions cost little more than one."""
    return epoch_order(samples, seed, epoch)(np.arange(number * _BLOCK, min((number + 1) * _BLOCK, samples)))


_BLOCK = 4096
