"""Samples made into the tensors of one forward pass, with what cannot matter taken out of the numbers.

Positions after a row's last label reach no loss: attention is causal and nothing there is predicted. They
are padding, whether a data set put them there or this module did to make the token count a multiple that fp8
takes. Each row's become a document of their own with the id PAD, whose embedding is zero (`PadEmbedding`);
through a Llama without biases every activation and gradient of theirs is then exactly zero, so that no
scaling factor ever sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from crosstrain.components.core.data import IGNORE, Sample

PAD = -1
"""Input id whose embedding is zero; no vocabulary has it."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch."""

    input_ids: torch.Tensor
    """[B, L], int64."""
    position_ids: torch.Tensor
    """[B, L], int64: restart at 0 at each document."""
    targets: torch.Tensor
    """[B, L], int64: the id that position t is to predict, that is the label of t + 1; IGNORE where none."""
    labels: int
    """Targets that are not IGNORE."""
    tokens: int
    """Positions up to each row's last label: padding is not counted."""

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """input_ids, position_ids and targets on a device, as `loss_sum` takes them."""
        moved = [item.to(device, non_blocking=True) for item in (self.input_ids, self.position_ids, self.targets)]
        return moved[0], moved[1], moved[2]


def make_batch(samples: Sequence[Sample], token_multiple: int = 1) -> Batch:
    """The batch of some samples; shorter ones are lengthened to the longest.

    Args:
        samples: B samples.
        token_multiple: B x L is made a multiple of this; above 1, everything past a row's last label becomes PAD.
    """
    step = token_multiple // gcd(len(samples), token_multiple)
    length = -(-max(len(sample.input_ids) for sample in samples) // step) * step
    ids, positions = np.zeros((2, len(samples), length), np.int64)
    targets = np.full((len(samples), length), IGNORE, np.int64)
    tokens = 0
    for row, sample in enumerate(samples):
        size = len(sample.input_ids)
        labelled = np.flatnonzero(sample.labels[1:] != IGNORE)
        used = int(labelled[-1]) + 2 if len(labelled) else 0
        kept = used if token_multiple > 1 else size
        ids[row, :kept], positions[row, :kept] = sample.input_ids[:kept], sample.position_ids[:kept]
        ids[row, kept:], positions[row, kept:] = PAD if token_multiple > 1 else 0, np.arange(length - kept)
        targets[row, : size - 1] = sample.labels[1:]
        tokens += used
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(targets),
        labels=int((targets != IGNORE).sum()),
        tokens=tokens,
    )


def blank(sample: Sample) -> Sample:
    """A sample of the same length that reaches no loss: what fills a rank's micro-batch up."""
    return replace(sample, labels=np.full_like(sample.labels, IGNORE))


class PadEmbedding(nn.Embedding):
    """An embedding that gives zeros for PAD, and passes no gradient from there."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, L, hidden] of ids [B, L]."""
        is_token = (input != PAD).unsqueeze(-1)
        return super().forward(input.clamp_min(0)) * is_token


def accept_pads(model: nn.Module) -> None:
    """Let a model's input embedding know PAD; parameters and names stay as they are."""
    embedding = cast(PreTrainedModel, model).get_input_embeddings()
    if type(embedding) is not PadEmbedding:
        assert type(embedding) is nn.Embedding, f"cannot pad through {type(embedding).__name__}"
        embedding.__class__ = PadEmbedding


def loss_sum(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropies of a batch's targets, in nats, fp32; 0 when there are none.

    Documents are kept apart by their restarting positions: with no attention mask and no cache, transformers
    builds the block-causal mask from them.

    Args:
        model: A causal LM.
        input_ids: [B, L]; see Batch.
        position_ids: [B, L]; see Batch.
        targets: [B, L]; see Batch.
    """
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
