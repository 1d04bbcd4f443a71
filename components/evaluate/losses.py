"""What a model predicts of held-out text: loss and hits of every document, piece by piece.

Samples cut documents, so that what is measured is the piece: the part of one document within one sample.
Pieces are summed by document or by sample afterwards (`group`). Both models run over the same samples in
the same batches. Left out on purpose: sliding windows that would give a cut document's second piece its
context back; both models lose it alike.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedModel

from crosstrain.components.core.data import IGNORE, Sample, ShardDataset, collate
from crosstrain.components.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents within samples; every array is [pieces], pieces without a predicted token left out."""

    sample: Int64s
    document: Int64s
    """Index of the document in the split, from 0."""
    tokens: Int64s
    """Predicted tokens."""
    loss: NDArray[np.float64]
    """Sum of their negative log-likelihoods, nats."""
    hits: Int64s
    """How many of them the model ranks first."""


@dataclass(frozen=True)
class HeldOut:
    """The part of a validation split that is measured, numbered by document."""

    samples: ShardDataset
    max_samples: int | None = None
    max_documents: int | None = None

    def __iter__(self) -> Iterator[tuple[int, Sample, Int64s]]:
        """Sample index, sample (labels beyond `max_documents` masked), and document index of each position [L]."""
        last = -1
        for index in range(min(len(self.samples), self.max_samples or len(self.samples))):
            sample = self.samples[index]
            documents = np.cumsum(sample.position_ids == 0) + (last - 1 if sample.continues else last)
            last = int(documents[-1])
            if self.max_documents is not None:
                if documents[0] >= self.max_documents:
                    return
                labels = np.where(documents < self.max_documents, sample.labels, IGNORE)
                sample = Sample(sample.input_ids, labels, sample.position_ids, sample.continues)
            yield index, sample, documents


def score(model: PreTrainedModel, held_out: HeldOut, batch_tokens: int, name: str) -> Pieces:
    """Run a model over held-out samples.

    Args:
        model: A causal language model, in evaluation mode, on the device to use.
        held_out: What to predict.
        batch_tokens: Tokens a forward pass, at least one sample.
        name: What the model is, for errors and progress: "the candidate model at …".

    Raises:
        ValueError: a loss is not a finite number; nothing was measured then.
    """
    found: list[Pieces] = []
    size = max(1, batch_tokens // held_out.samples.sequence_length)
    for batch in _batches(held_out, size):
        losses, hits = _predict(model, [sample for _, sample, _ in batch])
        for (index, sample, documents), loss, hit in zip(batch, losses, hits, strict=True):
            wrong = documents[~np.isfinite(loss)]
            if wrong.size:
                raise ValueError(
                    f"{name}: its loss is not a finite number in document {wrong[0]} (sample {index}); the weights are "
                    "damaged or training diverged: evaluate an earlier checkpoint, or train again"
                )
            found.append(_pieces(index, sample, documents, loss, hit))
    columns = [np.concatenate(column) for column in zip(*(astuple(one) for one in found), strict=True)]
    log.info("%s: %d tokens in %d samples", name, columns[2].sum(), len(found))
    return Pieces(*columns)


def _pieces(index: int, sample: Sample, documents: Int64s, loss: NDArray[np.float64], hit: NDArray[np.bool_]) -> Pieces:
    """One sample's losses [L] and hits [L], summed by document."""
    counted = sample.labels != IGNORE
    distinct, tokens, losses, hits = group(documents, counted, loss, hit & counted)
    some = tokens > 0
    samples = np.full(int(some.sum()), index, np.int64)
    return Pieces(samples, distinct[some], tokens[some].astype(int), losses[some], hits[some].astype(int))


def _batches(held_out: HeldOut, size: int) -> Iterator[list[tuple[int, Sample, Int64s]]]:
    batch: list[tuple[int, Sample, Int64s]] = []
    for item in held_out:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@torch.inference_mode()
def _predict(model: PreTrainedModel, samples: list[Sample]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Loss (nats) of the token at each position, 0 where the label is IGNORE, and whether it was ranked first; [B, L].

    Positions that restart, without an attention mask and a cache, make transformers keep documents apart.
    """
    batch = {key: torch.from_numpy(value).to(model.device) for key, value in collate(samples).items()}
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    logits = output.logits.flatten(0, 1).float()
    following = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE).flatten()
    losses = functional.cross_entropy(logits, following, ignore_index=IGNORE, reduction="none")
    shape = (len(samples), -1)
    hits = logits.argmax(-1) == following
    return (
        losses.view(shape).roll(1, dims=1).double().cpu().numpy(),
        hits.view(shape).roll(1, dims=1).cpu().numpy(),
    )


def group(keys: Int64s, *columns: NDArray) -> tuple[NDArray, ...]:
    """Sums of the columns by key: the distinct keys in order, then one array of sums (float64) a column."""
    distinct, places = np.unique(keys, return_inverse=True)
    return distinct, *(np.bincount(places, weights=column, minlength=distinct.size) for column in columns)


def token_bytes(tokenizer: Tokenizer) -> Int64s | None:
    """UTF-8 bytes that each token stands for, 0 for special ones; [vocab_size].

    Returns:
        None when tokens are not runs of bytes (no ByteLevel decoder), so that bytes by token are not known.
    """
    if (json.loads(tokenizer.reference.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for text, number in tokenizer.reference.get_vocab(with_added_tokens=False).items():
        lengths[number] = len(text)  # one character of the byte alphabet a byte
    for number, token in tokenizer.reference.get_added_tokens_decoder().items():
        lengths[number] = 0 if token.special else len(token.content.encode())
    return lengths
