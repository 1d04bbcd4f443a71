"""Watches loss and gradient norm, and tells when a run has gone wrong.

What is judged is what torchtitan's and Megatron's users report as the signs of FP8 divergence: a value that
is not finite, a loss ten times the recent mean, or one twice the mean for several steps. The guard only
judges; going back and replaying is the loop's (core/training). Its state is plain JSON, so that a
checkpoint holds it and a resumed run judges as the uninterrupted one would. Left out on purpose: anything
that looks into tensors.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from crosstrain.components.core.training_config import TrainingOptions

WARM_UP = 5
"""Losses seen before a loss can be called a spike."""


class Diverged(ValueError):
    """Training went wrong and is not to go on; the message says at which step, why, and what is left."""


@dataclass(frozen=True)
class Event:
    """One decision of the guard, as the audit trail and the model's manifest hold it."""

    step: int
    """Optimizer step (from 1) at which it was taken."""
    action: Literal["rolled_back", "recovered", "stopped"]
    reason: str
    precision: str
    """Precision in force when it was taken."""
    rolled_back_to: int | None = None
    """Steps done in the checkpoint that the run went back to."""
    replay_until: int | None = None
    """Last step to run in high precision."""
    verdict: str = ""
    """What is known after it, in words."""

    def record(self) -> dict[str, Any]:
        """The event as JSON, without what does not apply."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass
class Guard:
    """Judges each step before its update is applied.

    >>> guard = Guard(TrainingOptions())
    >>> guard.judge(float("nan"), 1.0)
    'the loss is nan'
    """

    options: TrainingOptions
    window: list[float] = field(default_factory=list)
    """Losses of the last steps that were not suspicious, oldest first."""
    streak: int = 0
    """Suspicious steps in a row."""

    def judge(self, loss: float, grad_norm: float) -> str:
        """Why this step is a divergence, or "" when it is none; remembers the loss.

        Args:
            loss: Mean loss of the global batch, nats a token.
            grad_norm: Norm of its gradient before clipping.
        """
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        options = self.options
        if len(self.window) >= min(WARM_UP, options.spike_window):
            mean = sum(self.window) / len(self.window)
            if loss > options.spike_limit * mean:
                return f"the loss {loss:.4g} is over {options.spike_limit:g} times the recent mean {mean:.4g}"
            if loss > options.spike_factor * mean:
                self.streak += 1
                if self.streak >= options.spike_patience:
                    return (
                        f"the loss {loss:.4g} is over {options.spike_factor:g} times the recent mean {mean:.4g} "
                        f"for {self.streak} steps"
                    )
                return ""
        self.streak = 0
        self.window = [*self.window, loss][-options.spike_window :]
        return ""

    @property
    def suspicious(self) -> bool:
        """Whether the last steps look bad without being a divergence yet: no time for a checkpoint."""
        return self.streak > 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        return {"window": list(self.window), "streak": self.streak}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.window, self.streak = list(state["window"]), int(state["streak"])
