"""Samples as optimum-neuron takes them: every sequence of one length, in the order of our own plan.

Graphs are compiled for one shape, so that short rows are padded; padding comes last, and attention is causal, so it
reaches nothing but itself and has no labels. Positions are not passed: where several rows are in one sequence there is
no mask between them, and they run on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from crosstrain.components.core.data import IGNORE, BatchPlan, Sample


class Samples(Protocol):
    """Anything with numbered samples."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


class Ordered:
    """All samples of a run, step after step: what the trainer's sampler hands out in turn, never shuffled.

    Over `data` data-parallel ranks its sampler gives rank r every `data`-th sample, so that the samples of a step are
    those of the plan's step whatever the number of ranks.
    """

    def __init__(self, samples: Samples, plan: BatchPlan, steps: int, length: int, pad: int) -> None:
        self._samples, self._plan, self._steps = samples, plan, steps
        self._length, self._pad = length, pad
        self._size = len(plan.indices(0))
        self._totals = [0]

    def __len__(self) -> int:
        return self._steps * self._size

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        if not 0 <= position < len(self):
            raise IndexError(position)
        step, place = divmod(position, self._size)
        return fixed(self._samples[int(self._plan.indices(step)[place])], self._length, self._pad)

    def tokens(self, steps: int) -> int:
        """Tokens of the first steps, padding left out."""
        while len(self._totals) <= steps:
            taken = self._plan.indices(len(self._totals) - 1)
            self._totals.append(self._totals[-1] + sum(len(self._samples[int(index)].input_ids) for index in taken))
        return self._totals[steps]


def fixed(sample: Sample, length: int, pad: int) -> dict[str, torch.Tensor]:
    """A sample as input_ids, labels and attention_mask, [length] int64 each, padded at the end."""
    size = len(sample.input_ids)
    assert size <= length, "rows are cut before"
    filled = np.full(length - size, pad)
    return {
        "input_ids": torch.from_numpy(np.concatenate([sample.input_ids, filled]).astype(np.int64)),
        "labels": torch.from_numpy(np.concatenate([sample.labels, np.full(length - size, IGNORE)]).astype(np.int64)),
        "attention_mask": torch.from_numpy((np.arange(length) < size).astype(np.int64)),
    }


def collate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples one above the other, [B, length]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
