"""What an evaluation found: the numbers behind report, metrics and verdict, computed once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from crosstrain.components.core.manifest import finite
from crosstrain.components.evaluate.statistics import Comparison, Finding, Interval, describe, judge, perplexity


@dataclass(frozen=True)
class SetOutcome:
    """Both models on the validation split of one shards artifact."""

    comparison: Comparison
    unigram_entropy: float | None
    """Cross-entropy of the training split's unigram model, nats/token; None without a training split."""
    text_bytes: int | None
    """UTF-8 bytes of the predicted tokens, where the tokenizer tells."""
    shards_sha256: str

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats/token as bits for each byte of text, comparable between tokenizers."""
        if not self.text_bytes:
            return None
        return loss * self.comparison.tokens / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Generation:
    """One held-out document's beginning, and how it goes on."""

    document: int
    prompt: str
    truth: str
    baseline: str
    candidate: str


@dataclass(frozen=True)
class Outcome:
    """The whole evaluation."""

    data: SetOutcome
    forgetting: SetOutcome | None
    margin: float
    max_forgetting: float | None
    generations: list[Generation]
    device: str
    dtype: str

    @property
    def learned(self) -> bool:
        """Whether the candidate passes on the data that it is judged by."""
        return judge(self.data.comparison.improvement, self.margin)

    @property
    def remembered(self) -> bool:
        """Whether the candidate passes on the forgetting set; True where that is not judged."""
        if self.forgetting is None or self.max_forgetting is None:
            return True
        return judge(self.forgetting.comparison.improvement, self.max_forgetting)

    @property
    def passed(self) -> bool:
        return self.learned and self.remembered

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        return "pass" if self.passed else "fail"

    @property
    def finding(self) -> Finding:
        return describe(self.data.comparison.improvement)

    @property
    def tokens(self) -> int:
        """Tokens that each model predicted, over all sets."""
        return sum(one.comparison.tokens for one in (self.data, self.forgetting) if one is not None)

    def sentences(self) -> list[str]:
        """What was found, and why that is a pass or a fail."""
        target, before = self.data.comparison.improvement, self.forgetting
        failed = [
            name
            for name, good in (("held-out data", self.learned), ("the forgetting set", self.remembered))
            if not good
        ]
        why = f"Fails on {' and on '.join(failed)}. " if failed else ""
        told = [
            f"{why}On held-out data the candidate's loss {change(target)}: {self.finding}.",
            _rule("the improvement", target, self.margin, self.learned),
        ]
        if before is None:
            return told
        told.append(f"On the forgetting set it {change(before.comparison.improvement)}.")
        if self.max_forgetting is None:
            return [*told, "Forgetting is reported and not judged: max_forgetting is not set."]
        rule = _rule("the improvement there", before.comparison.improvement, self.max_forgetting, self.remembered)
        return [*told, rule]

    def record(self) -> dict[str, Any]:
        """What metrics.json holds."""
        comparison = self.data.comparison
        return {
            "verdict": self.verdict,
            "finding": self.finding,
            "unit": comparison.unit,
            "units": comparison.units,
            "reason": comparison.reason,
            "device": self.device,
            "dtype": self.dtype,
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Finite numbers by name: losses in nats/token, accuracies as fractions, `passed` and the like 0 or 1."""
        values: dict[str, float] = {
            "passed": float(self.passed),
            "significantly_better": float(self.finding == "significantly better"),
            "margin": self.margin,
            **dict(_set_metrics(self.data)),
        }
        if self.forgetting is not None:
            theirs = dict(_set_metrics(self.forgetting))
            values |= {f"forgetting_{name}": x for name, x in theirs.items() if not name.startswith("improvement")}
            values |= dict(_interval("forgetting", -self.forgetting.comparison.improvement))
        return finite(values)

    def headline(self) -> dict[str, float]:
        """The metrics without the intervals of either model alone: few enough for a table in a UI."""
        kept = {f"{name}_{end}" for name in ("improvement", "forgetting") for end in ("low", "high")}
        return {k: v for k, v in self.metrics().items() if k in kept or not k.endswith(("_low", "_high"))}


def change(improvement: Interval) -> str:
    """An improvement in words: `is lower by 0.1200 nats/token (95% interval 0.1000 to 0.1400)`."""
    if improvement.low == improvement.high == 0.0:
        return "is the same in every document"
    shown = improvement if improvement.value >= 0 else -improvement
    word = "lower" if improvement.value >= 0 else "higher"
    return f"is {word} by {shown.value:.4f} nats/token (95% interval {shown.low:.4f} to {shown.high:.4f})"


def _rule(name: str, improvement: Interval, margin: float, passed: bool) -> str:
    low, threshold = f"{improvement.low:+.4f}", f"{0.0 - margin:+.4f}"
    where = "at or above" if passed else "below"
    return (
        f"The interval of {name} has its lower end at {low}, {where} the threshold of {threshold} (margin {margin:g})."
    )


def _interval(name: str, interval: Interval) -> Iterator[tuple[str, float]]:
    yield name, interval.value
    yield f"{name}_low", interval.low
    yield f"{name}_high", interval.high


def _set_metrics(outcome: SetOutcome) -> Iterator[tuple[str, float]]:
    comparison = outcome.comparison
    yield from _interval("improvement", comparison.improvement)
    models = {
        "baseline": (comparison.baseline_loss, comparison.baseline_accuracy),
        "candidate": (comparison.candidate_loss, comparison.candidate_accuracy),
    }
    for name, (loss, accuracy) in models.items():
        yield from _interval(f"{name}_loss", loss)
        yield from _interval(f"{name}_perplexity", perplexity(loss))
        yield from _interval(f"{name}_accuracy", accuracy)
        if (bits := outcome.bits_per_byte(loss.value)) is not None:
            yield f"{name}_bits_per_byte", bits
    yield from _interval("accuracy_gain", comparison.accuracy_gain)
    if outcome.unigram_entropy is not None:
        yield "unigram_entropy", outcome.unigram_entropy
    yield "documents", comparison.documents
    yield "predicted_tokens", comparison.tokens
