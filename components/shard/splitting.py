"""Which documents belong to a split, and in which order: by hash, then shuffled, without holding either in memory.

A split's members are a file of document numbers, and the shuffle is a permutation computed at any position, so
memory does not grow with the corpus.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.data import Permutation, permutation
from crosstrain.components.core.tokens import Ids, Pair

SPLITS = ("train", "validation")

_HASHES = 2.0**64


def fetch_parts(tokens: Artifact) -> list[Path]:
    """The parts of a tokens artifact as verified local files: their stems."""
    stems = []
    for stem in tokens.facts.parts:
        for suffix in (".idx", ".hash", ".bin"):
            path = tokens.fetch(stem + suffix)
        stems.append(path.with_suffix(""))
    return stems


class Documents:
    """The documents of verified parts, numbered through all of them; mapped."""

    def __init__(self, stems: list[Path]) -> None:
        self.stems = stems
        self.pairs = [Pair(stem) for stem in stems]
        for stem, pair in zip(stems, self.pairs, strict=True):
            if stem.with_suffix(".hash").stat().st_size != 8 * len(pair):
                raise ValueError(f"{stem}.hash does not belong to {stem.name}.idx; make the tokens again")
        self.first = np.cumsum([0, *(len(pair) for pair in self.pairs)])
        """Number of each part's first document, and the number of all; [parts + 1]."""

    def hashes(self, part: int) -> NDArray[np.uint64]:
        """Hashes of a part's documents; [documents]."""
        return np.fromfile(self.stems[part].with_suffix(".hash"), "<u8")

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of some documents; [numbers]."""
        owners = self._owners(numbers)
        lengths = np.empty(numbers.size, np.int64)
        for owner in np.unique(owners).tolist():
            chosen = owners == owner
            lengths[chosen] = self.pairs[owner].lengths[numbers[chosen] - self.first[owner]]
        return lengths

    def ids(self, numbers: NDArray[np.int64]) -> list[Ids]:
        """The ids of some documents, mapped."""
        owners = self._owners(numbers)
        places = numbers - self.first[owners]
        return [self.pairs[owner][place] for owner, place in zip(owners.tolist(), places.tolist(), strict=True)]

    def _owners(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.first, numbers, side="right") - 1


@dataclass(frozen=True)
class Members:
    """The documents of one split in shuffled order. Small, so that it may go to another process."""

    path: Path
    """File of document numbers in the order of the corpus."""
    order: Permutation
    tokens: int

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Document numbers in the order of the corpus, mapped."""
        return np.memmap(self.path, np.int64, "r", shape=(len(self),)) if len(self) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.order.size

    def at(self, begin: int, end: int) -> NDArray[np.int64]:
        """Document numbers at positions [begin, end) of the shuffled order."""
        return np.asarray(self.numbers[self.order(np.arange(begin, min(end, len(self))))])


def split(documents: Documents, fraction: float, seed: int, scratch: Path) -> dict[str, Members]:
    """Split by hash, and shuffle.

    Raises:
        ValueError: a split would be empty.
    """
    paths = {name: scratch / f"{name}.members" for name in SPLITS}
    tokens = dict.fromkeys(SPLITS, 0)
    lowest, highest = 1.0, 0.0
    with paths["train"].open("wb") as train, paths["validation"].open("wb") as validation:
        files = {"train": train, "validation": validation}
        for part, pair in enumerate(documents.pairs):
            places = documents.hashes(part) / _HASHES
            held_out = places < fraction
            lowest, highest = min(lowest, places.min(initial=1.0)), max(highest, places.max(initial=0.0))
            for name, chosen in (("train", ~held_out), ("validation", held_out)):
                (np.flatnonzero(chosen) + documents.first[part]).astype(np.int64).tofile(files[name])
                tokens[name] += int(pair.lengths[chosen].sum(dtype=np.int64))
    members = {
        name: Members(paths[name], permutation(paths[name].stat().st_size // 8, "shuffle", name, seed), tokens[name])
        for name in SPLITS
    }
    count = int(documents.first[-1])
    if not len(members["train"]):
        raise ValueError(
            f"the train split would be empty: all {count} documents fall to validation; give more documents, or a "
            f"validation_fraction of at most {highest:.3g} (given {fraction})"
        )
    if fraction and not len(members["validation"]):
        raise ValueError(
            f"the validation split would be empty: none of {count} documents falls to it; give more documents, a "
            f"validation_fraction above {lowest:.3g} (given {fraction}), or 0 for no validation split"
        )
    return members
