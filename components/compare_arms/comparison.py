"""What a comparison found: the numbers behind report, metrics and verdict, computed once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain.components.compare_arms.arms import Pair, Run, Study
from crosstrain.components.compare_arms.statistics import Estimate, Verdict, estimate, judge
from crosstrain.components.core import cost


@dataclass(frozen=True)
class Price:
    """What a run of one arm cost, or why nobody knows."""

    usd: float | None
    provenance: str


@dataclass(frozen=True)
class Comparison:
    """Two arms, run by run."""

    study: Study
    pairs: list[Pair]
    margin: float
    """Percent."""
    gap: Estimate
    """Percent of the control's loss."""
    speed: Estimate | None
    """Tokens a second of the candidate over the control's, minus one, in percent; None: nothing real was measured."""
    costs: tuple["Price", "Price"] | None
    """Mean cost of a run of the control and of the candidate; None as above."""

    @property
    def verdict(self) -> Verdict:
        return judge(self.gap, self.margin)

    @property
    def emulated(self) -> bool:
        """Whether an arm imitated its number format."""
        return any(run.emulated for pair in self.pairs for run in (pair.control, pair.candidate))

    @property
    def unigram_entropy(self) -> float | None:
        """Held-out loss that counting tokens reaches, nats a token, where the runs recorded it."""
        return self.pairs[0].control.metrics.get("unigram_entropy")

    @property
    def unlearned(self) -> bool:
        """Whether the control is no better than counting tokens, so that equal losses say nothing."""
        return self.unigram_entropy is not None and self.mean_losses()[0] >= self.unigram_entropy

    @property
    def arms(self) -> tuple[list[Run], list[Run]]:
        """The runs of the control and of the candidate, by rising seed."""
        return [pair.control for pair in self.pairs], [pair.candidate for pair in self.pairs]

    @property
    def labels(self) -> tuple[str, str]:
        return self.pairs[0].control.label, self.pairs[0].candidate.label

    def mean_losses(self) -> tuple[float, float]:
        """Held-out losses of both arms, nats a token, mean over the seeds."""
        control, candidate = (math.fsum(run.loss for run in arm) / len(arm) for arm in self.arms)
        return control, candidate

    def record(self) -> dict[str, Any]:
        """What comparison.json holds: all that does not depend on the machine."""
        return {
            "study": self.study,
            "verdict": self.verdict,
            "margin_percent": self.margin,
            "arms": dict(zip(("control", "candidate"), self.labels, strict=True)),
            "gap_percent": vars(self.gap),
            "seeds": [
                {
                    "seed": pair.control.seed,
                    "control_loss": pair.control.loss,
                    "candidate_loss": pair.candidate.loss,
                    "gap_percent": pair.percent,
                }
                for pair in self.pairs
            ],
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Losses in nats a token, gap in percent; `equivalent` is 1 or 0."""
        control, candidate = self.mean_losses()
        return {
            "equivalent": float(self.verdict == "equivalent"),
            "gap_percent": self.gap.mean,
            "gap_percent_low": self.gap.low,
            "gap_percent_high": self.gap.high,
            "margin_percent": self.margin,
            "seeds": float(self.gap.count),
            "control_loss": control,
            "candidate_loss": candidate,
            "control_perplexity": math.exp(control),
            "candidate_perplexity": math.exp(candidate),
        }

    def measured(self) -> dict[str, float]:
        """What depends on the machine, where it is real."""
        found: dict[str, float] = {"learned": float(not self.unlearned)}
        if self.speed is not None:
            found |= {"speed_up_percent": self.speed.mean, "speed_up_percent_low": self.speed.low}
            found["speed_up_percent_high"] = self.speed.high
        for name, price in zip(("control", "candidate"), self.costs or (), strict=False):
            if price.usd is not None:
                found[f"{name}_cost_usd"] = price.usd
        return found


def compare(
    study: Study, pairs: list[Pair], margin: float, instance_type: str, prices: Mapping[str, cost.Price]
) -> Comparison:
    """Compare two arms.

    Args:
        study: What they differ in.
        pairs: Their runs.
        margin: Percent.
        instance_type: What both ran on; empty: not known.
        prices: By instance type, USD.
    """
    runs = [run for pair in pairs for run in (pair.control, pair.candidate)]
    real = not any(run.emulated for run in runs) and all(run.seconds for run in runs)
    real = real and len({run.platform for run in runs}) == 1
    speed = costs = None
    if real:
        rates = [(pair.control.metrics, pair.candidate.metrics) for pair in pairs]
        name = "tokens_per_second"
        speed = estimate([100 * (candidate[name] / control[name] - 1) for control, candidate in rates])
        costs = (
            _cost([pair.control for pair in pairs], instance_type, prices),
            _cost([pair.candidate for pair in pairs], instance_type, prices),
        )
    gap = estimate([pair.percent for pair in pairs])
    return Comparison(study, pairs, margin, gap, speed, costs)


def _cost(runs: list[Run], instance_type: str, prices: Mapping[str, cost.Price]) -> Price:
    recorded = [run.metrics["cost_usd"] for run in runs if "cost_usd" in run.metrics]
    if len(recorded) == len(runs):
        return Price(math.fsum(recorded) / len(runs), "as each run's job recorded it")
    seconds = math.fsum(run.seconds or 0.0 for run in runs) / len(runs)
    found = cost.step_cost(instance_type, 1, cost.Timing(wall_seconds=seconds), prices=prices)
    return Price(found.usd if isinstance(found, cost.Cost) else None, found.provenance())
