"""From gaps by seed to an interval and a verdict.

Seeds are few, and the runs of one seed share initial weights and sample order: therefore Student's interval over the
paired differences, n - 1 degrees of freedom. The verdict is that of two one-sided tests (TOST) with a 95% interval
where the usual one takes 90%: each of the two tests is made at 2.5%. Left out on purpose: p-values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import t as student

CONFIDENCE = 0.95

Verdict = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval."""

    count: int
    mean: float
    deviation: float
    """Standard deviation over the seeds, n - 1 in the denominator."""
    quantile: float
    """Student's t."""
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of paired differences, one a seed, at least two."""
    count = len(values)
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    half = quantile * deviation / math.sqrt(count)
    return Estimate(count, mean, deviation, quantile, mean - half, mean + half)


def judge(gap: Estimate, margin: float) -> Verdict:
    """Whether the whole interval is inside plus and minus the margin, outside of them, or neither."""
    if -margin <= gap.low and gap.high <= margin:
        return "equivalent"
    return "different" if gap.low > margin or gap.high < -margin else "undecided"
