"""Rows packed into sequences, so that short ones do not leave most of a batch to padding.

Which rows share a sequence is a function of their lengths alone: the longest first, each into the fullest sequence
that still takes it (best-fit decreasing). Positions restart at every row, by which the model keeps rows apart, and a
row's first id has no label, as no other row may be asked to predict it. Left out on purpose: cutting a row in two.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.finetune_lora.rows import RowDataset


class PackedRows:
    """Samples that hold one or several rows, each at most `sequence_length` ids."""

    def __init__(self, rows: RowDataset, sequence_length: int) -> None:
        self.rows = rows
        self._packs = pack(rows.lengths, sequence_length)

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Sample:
        rows = [self.rows[row] for row in self._packs[index]]
        labels = np.concatenate([row.labels for row in rows])
        labels[np.cumsum([0, *(len(row.labels) for row in rows[:-1])])] = IGNORE
        ids = np.concatenate([row.input_ids for row in rows])
        return Sample(ids, labels, np.concatenate([row.position_ids for row in rows]))


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of rows by sequence; within one, and among them by their first, in the order of the data.

    Args:
        lengths: Of each row, at most `size`.
        size: Ids that a sequence takes.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those that `by_room` has, ascending
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect_left(rooms, lengths[row])
        if place == len(rooms):
            number, room = len(packs), size
            packs.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        packs[number].append(row)
        if left := room - lengths[row]:
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(number)
    return sorted(sorted(members) for members in packs)
