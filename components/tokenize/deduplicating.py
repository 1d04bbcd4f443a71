"""Exact deduplication: of documents with equal text, the first in the order of the corpus stays.

Hashes find the candidates, equal ids decide, so that no document is lost to a collision. Works on finished
parts, in passes over ranges of hashes, so memory is bounded and the output does not depend on workers.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosstrain.components.core.storage import Store
from crosstrain.components.core.tokens import Pair, PairWriter
from crosstrain.components.tokenize.tally import Counts

PAIR = (".bin", ".idx", ".hash")
"""What a part always consists of."""

DOCUMENTS_A_PASS = 1 << 23
"""Documents looked at together; some 40 bytes of memory each."""


class Parts:
    """Finished parts as local files: where the output keeps them, or fetched into a scratch folder."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self._store = store
        self._scratch = scratch
        self._pairs: dict[str, Pair] = {}

    def path(self, name: str) -> Path:
        """The local file of one object."""
        local = self._store.local_path(name)
        if local is None:
            local = self._scratch / name
            if not local.is_file():
                local.parent.mkdir(parents=True, exist_ok=True)
                self._store.download(name, local)
        return local

    def hashes(self, stem: str) -> NDArray[np.uint64]:
        """The hashes of a part's documents."""
        return np.fromfile(self.path(f"{stem}.hash"), "<u8")

    def pair(self, stem: str) -> Pair:
        """A part's ids, mapped."""
        if stem not in self._pairs:
            self.path(f"{stem}.idx")
            self._pairs[stem] = Pair(self.path(f"{stem}.bin").with_suffix(""))
        return self._pairs[stem]


def find_duplicates(parts: Parts, stems: list[str]) -> dict[str, list[int]]:
    """Documents to drop: part to positions in it, ascending."""
    total = sum(parts.hashes(stem).size for stem in stems)
    passes = -(-total // DOCUMENTS_A_PASS)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number in range(passes):
        for stem, position in _find_in_range(parts, stems, number, passes):
            found[stem].append(position)
    return {stem: sorted(positions) for stem, positions in found.items()}


def _find_in_range(parts: Parts, stems: list[str], number: int, passes: int) -> list[tuple[str, int]]:
    values, owners, positions = [], [], []
    for owner, stem in enumerate(stems):
        hashes = parts.hashes(stem)
        chosen = np.flatnonzero(hashes % np.uint64(passes) == number)
        values.append(hashes[chosen])
        owners.append(np.full(chosen.size, owner, np.int32))
        positions.append(chosen)
    value, owner_of, position = (np.concatenate(items) for items in (values, owners, positions))
    order = np.argsort(value, kind="stable")
    value = value[order]
    repeats = np.flatnonzero(value[1:] == value[:-1]) + 1
    dropped = []
    kept: list[NDArray] = []
    previous = -1
    for place in repeats.tolist():
        if place != previous + 1:
            kept = [_ids(parts, stems, owner_of, position, order[place - 1])]
        previous = place
        ids = _ids(parts, stems, owner_of, position, order[place])
        if any(np.array_equal(ids, other) for other in kept):
            dropped.append((stems[owner_of[order[place]]], int(position[order[place]])))
        else:
            kept.append(ids)
    return dropped


def _ids(parts: Parts, stems: list[str], owners: NDArray, positions: NDArray, index: int) -> NDArray:
    return parts.pair(stems[owners[index]])[int(positions[index])]


def drop_documents(parts: Parts, stem: str, sizes: str, positions: list[int], target: Path) -> Counts:
    """Write a part without the documents at `positions` to `target`; the documents, tokens and text bytes dropped.

    `sizes` names the object with the bytes of each document's text.
    """
    pair, hashes = parts.pair(stem), parts.hashes(stem)
    stays = np.ones(len(pair), np.bool_)
    stays[positions] = False
    with PairWriter(target, pair.dtype) as writer:
        for document in np.flatnonzero(stays).tolist():
            ids = pair[document]
            writer.write(ids, np.array([ids.size]))
    hashes[stays].tofile(target.with_name(target.name + ".hash"))
    text_bytes = np.fromfile(parts.path(sizes), "<u8")
    return Counts(
        documents=len(positions),
        tokens=int(pair.lengths[~stays].sum(dtype=np.int64)),
        text_bytes=int(text_bytes[~stays].sum()),
    )
