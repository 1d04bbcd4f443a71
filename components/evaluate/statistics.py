"""From losses by document to intervals and a verdict.

A loss is a ratio, nats over tokens, and tokens of one document hang together; therefore whole documents are
resampled, and each resample's ratio is taken anew (scipy's paired percentile bootstrap). Both models share
the resamples, so that the interval of their difference is that of paired documents. Left out on purpose:
tests of other hypotheses; a margin and an interval say all that the gate needs.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from crosstrain.components.evaluate.losses import Pieces, group

CONFIDENCE = 0.95
FEW = 20
"""Below so many documents samples are resampled instead."""
_BATCH_ELEMENTS = 2**21

Floats = NDArray[np.float64]
Finding = Literal["identical", "significantly better", "significantly worse", "no significant difference"]


@dataclass(frozen=True)
class Interval:
    """A value and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __neg__(self) -> "Interval":
        return Interval(-self.value, -self.high, -self.low)


@dataclass(frozen=True)
class Comparison:
    """Two models on one held-out set. Losses in nats/token, accuracies of the next token as fractions."""

    baseline_loss: Interval
    candidate_loss: Interval
    improvement: Interval
    """Baseline's loss minus candidate's: above 0 the candidate is better."""
    baseline_accuracy: Interval
    candidate_accuracy: Interval
    accuracy_gain: Interval
    unit: Literal["document", "sample"]
    """What was resampled."""
    units: int
    documents: int
    tokens: int
    """Predicted tokens."""
    reason: str
    """Why samples were resampled, or why the interval is rough; empty when neither holds."""
    differences: tuple[float, ...]
    """Baseline's loss minus candidate's of each document, nats/token."""


def compare(baseline: Pieces, candidate: Pieces, resamples: int, seed: int) -> Comparison:
    """Compare two models' losses over the same pieces of documents.

    Args:
        baseline: What the baseline scored.
        candidate: What the candidate scored; sample, document and tokens are the same as the baseline's.
        resamples: Bootstrap resamples.
        seed: Seed of the resampling; the same seed gives the same intervals.

    Raises:
        ValueError: fewer than two documents and samples, so that nothing can be resampled.
    """
    documents = _columns(baseline, candidate, baseline.document)
    samples = _columns(baseline, candidate, baseline.sample)
    unit, reason = choose_unit(documents.shape[1], samples.shape[1])
    units = documents if unit == "document" else samples
    values, low, high = _bootstrap(units, resamples, seed)
    intervals = [Interval(*(float(x) for x in row)) for row in zip(values, low, high, strict=True)]
    tokens, baseline_loss, candidate_loss = documents[:3]
    return Comparison(
        baseline_loss=intervals[0],
        candidate_loss=intervals[1],
        improvement=intervals[2],
        baseline_accuracy=intervals[3],
        candidate_accuracy=intervals[4],
        accuracy_gain=intervals[5],
        unit=unit,
        units=units.shape[1],
        documents=documents.shape[1],
        tokens=int(tokens.sum()),
        reason=reason,
        differences=tuple(float(x) for x in (baseline_loss - candidate_loss) / tokens),
    )


def choose_unit(documents: int, samples: int) -> tuple[Literal["document", "sample"], str]:
    """What to resample, and why when it is not simply documents.

    Raises:
        ValueError: fewer than two of both.
    """
    if documents >= FEW:
        return "document", ""
    if max(documents, samples) < 2:
        raise ValueError(
            f"the validation split gives {documents} document in {samples} sample to compare, and an interval needs "
            "at least two; put more data into the validation split, or raise max_documents and max_samples"
        )
    if samples > documents:
        return "sample", (
            f"Only {documents} documents, fewer than {FEW}: samples were resampled instead. Samples of one document "
            "are not independent, so that the intervals may be too narrow."
        )
    return "document", f"Only {documents} documents in {samples} samples: the intervals are rough."


def judge(improvement: Interval, margin: float) -> bool:
    """Pass: the interval's lower end is at -margin or above it (nats/token)."""
    return improvement.low >= -margin


def describe(improvement: Interval) -> Finding:
    """What the interval says about better or worse, whatever the margin."""
    if improvement.low == improvement.high == 0.0:
        return "identical"
    if improvement.low > 0.0:
        return "significantly better"
    return "significantly worse" if improvement.high < 0.0 else "no significant difference"


def perplexity(loss: Interval) -> Interval:
    """Exp of the loss; infinite where that overflows."""
    with np.errstate(over="ignore"):
        return Interval(*(float(np.exp(x)) for x in (loss.value, loss.low, loss.high)))


def _columns(baseline: Pieces, candidate: Pieces, keys: NDArray[np.int64]) -> Floats:
    """Sums by key: tokens, baseline's loss, candidate's loss, baseline's hits, candidate's hits [5, units]."""
    columns = (baseline.tokens, baseline.loss, candidate.loss, baseline.hits, candidate.hits)
    return np.stack(group(keys, *columns)[1:])


def _statistics(tokens: Floats, b: Floats, c: Floats, b_hits: Floats, c_hits: Floats, axis: int = -1) -> Floats:
    """Six ratios of sums; a difference is summed as a difference, so that equal models differ by exactly 0."""
    total = tokens.sum(axis)
    sums = [column.sum(axis) for column in (b, c, b - c, b_hits, c_hits, c_hits - b_hits)]
    return np.stack(sums) / total


def _bootstrap(units: Floats, resamples: int, seed: int) -> tuple[Floats, Floats, Floats]:
    found = bootstrap(
        tuple(units),
        _statistics,
        n_resamples=resamples,
        batch=max(1, _BATCH_ELEMENTS // units.shape[1]),
        vectorized=True,
        paired=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return _statistics(*units), found.confidence_interval.low, found.confidence_interval.high
