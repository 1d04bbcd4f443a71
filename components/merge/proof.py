"""The proof of a merge: base plus adapter and the merged model give the same logits on fixed prompts.

Both sides run in FP32 from what is on disk: the base's weights with peft's own unmerged forward pass, and the
merged files as they were written, under the merged config.json. So a wrong formula, a lost tensor, a damaged
write and a lost option (rope scaling, tied embeddings) all show. Half of the prompts are read at positions
stretched over the model's whole context, because options of the position encoding hardly change short texts.

What may differ is rounding, and how much a logit moves by it depends on the model. So it is measured: a third pass
runs base plus adapter with a random relative error of at most half a unit in the last place on every weight that
the merge rounds (BF16: 2^-8, FP16: 2^-11, FP32: 2^-24), and one of 2^-21 on every matrix for FP32 sums taken in
another order. The largest difference that this noise makes, times the option `tolerance`, is what the merged model
may differ by. The noise is uniform, with 1.4 times the mean square error of true rounding (whose relative
error shrinks towards the upper end of each power of two), so that a sound merge stays near 0.7 of it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from crosstrain.components.core.storage import Store
from crosstrain.components.core.weights import DTYPES, Tensor
from crosstrain.components.merge.streamed import streamed_model

PROMPTS = (
    "The treaty was signed in the spring of 1648, after five years of talks in two towns, and it ended a war that",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot, rest = items[0], items[1:]\n",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nA: Let us count the hours first.",
    "Die Würde des Menschen ist unantastbar. In the kitchen, 12.5 % of 240 g is 30 g; add salt, stir well, and then",
)
"""Prose, code, arithmetic and mixed text; none is from a data set."""
TOKENS = 24
"""Tokens of each prompt."""
SUMS_NOISE = 2**-21
"""Relative error that stands for FP32 sums in another order."""


@dataclass(frozen=True)
class Model:
    """One side of the comparison."""

    settings: dict[str, Any]
    """config.json."""
    store: Store
    tensors: dict[str, Tensor]
    adapters: tuple[tuple[Path, float], ...] = ()
    """Folders of the adapters applied, and their weights."""


@dataclass(frozen=True)
class Proof:
    """What the comparison found."""

    max_abs_logit_difference: float
    rounding_logit_difference: float
    """Largest difference that noise of the size of rounding makes."""
    tolerance: float
    """How many times that the difference may be."""
    mean_kl: float
    """Mean over positions of KL(base + adapter || merged), nats."""
    argmax_agreement: float
    """Fraction of positions at which both prefer the same next token."""

    def check(self) -> None:
        """Raise ValueError unless the largest difference is a number that rounding explains."""
        allowed = self.tolerance * self.rounding_logit_difference
        if not self.max_abs_logit_difference <= allowed:
            raise ValueError(
                "merged model and base with adapter are not the same, and no manifest was written: logits differ by "
                f"{self.max_abs_logit_difference:.4g}, rounding explains {self.rounding_logit_difference:.4g}, and "
                f"{self.tolerance:g} times that is allowed (mean KL {self.mean_kl:.3g} nats, same next token at "
                f"{self.argmax_agreement:.1%} of positions)"
            )


def prove(reference: Model, merged: Model, rounded: Collection[str], tokenizer: Path | None, tolerance: float) -> Proof:
    """Compare the two sides on the fixed prompts.

    Args:
        reference: Base and adapter.
        merged: The merged model, as written.
        rounded: Names of the tensors that the merge rounded.
        tokenizer: tokenizer.json that encodes the prompts; None: their UTF-8 bytes, modulo the vocabulary, are
            the ids.
        tolerance: See `Proof`.
    """
    ids, positions = _inputs(merged.settings, tokenizer)
    kept = merged.settings["vocab_size"]  # a trimmed vocabulary is compared as far as it goes
    expected = _logits(reference, ids, positions)[:, :kept]
    noisy = _logits(reference, ids, positions, _noise(merged, rounded))[:, :kept]
    rounding = _largest_difference(expected, noisy)
    del noisy
    found = _logits(merged, ids, positions)
    if expected.shape != found.shape:
        raise ValueError(f"base with adapter gives logits {tuple(expected.shape)}, merged {tuple(found.shape)}")
    return Proof(
        max_abs_logit_difference=_largest_difference(expected, found),
        rounding_logit_difference=rounding,
        tolerance=tolerance,
        mean_kl=sum(_kl(p, q) for p, q in zip(expected, found, strict=True)) / len(expected),
        argmax_agreement=(expected.argmax(-1) == found.argmax(-1)).float().mean().item(),
    )


def _noise(merged: Model, rounded: Collection[str]) -> dict[str, float]:
    """Tensor name to the relative size of the noise on it."""
    noise = {}
    for name, tensor in merged.tensors.items():
        unit = torch.finfo(getattr(torch, DTYPES[tensor.dtype])).eps / 2 if name in rounded else 0.0
        noise[name] = unit + SUMS_NOISE
    return noise


def _largest_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    return max((p - q).abs().max().item() for p, q in zip(expected, found, strict=True))


def _inputs(settings: dict[str, Any], tokenizer: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions, both int64 [prompts, tokens]."""
    if tokenizer is None:
        rows = [[byte % settings["vocab_size"] for byte in text.encode()] for text in PROMPTS]
    else:
        encode = Tokenizer.from_file(str(tokenizer)).encode
        rows = [encode(text, add_special_tokens=False).ids for text in PROMPTS]
    context = settings["max_position_embeddings"]
    length = min(TOKENS, context, *(len(row) for row in rows))
    plain = torch.arange(length)
    stretched = torch.linspace(0, context - 1, length).long()
    positions = torch.stack([stretched if number % 2 else plain for number in range(len(rows))])
    return torch.tensor([row[:length] for row in rows]), positions


def _logits(
    side: Model, ids: torch.Tensor, positions: torch.Tensor, noise: dict[str, float] | None = None
) -> torch.Tensor:
    """FP32 logits [prompts * tokens, vocabulary]."""
    model = streamed_model(side.settings, side.store, side.tensors, side.adapters, noise)
    with torch.inference_mode():
        # The mask is given because positions with gaps would be taken for packed documents.
        output = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    return output.logits.flatten(0, 1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL divergence in nats of two rows of logits [vocabulary], summed in FP64."""
    log_p, log_q = functional.log_softmax(p.double(), -1), functional.log_softmax(q.double(), -1)
    return max((log_p.exp() * (log_p - log_q)).sum().item(), 0.0)
