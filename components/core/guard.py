"""Watches a run, tells when it has gone wrong, and decides what to do about it: nothing here touches tensors.

What is judged is what torchtitan's and Megatron's users report as the signs of FP8 divergence: a loss or gradient
norm that is not finite, a loss ten times the recent mean or one twice the mean for several steps, a gradient norm far
above its mean, and, where fp8's numbers are looked at, a layer whose tensors saturate. On any of them the update of
that step is not applied. `decide` then goes back to the last good checkpoint and either leaves out the data that the
run fell over (skip), or replays in a higher precision, the layers at fault or all of them (fallback); retries are
bounded, and every decision is an `Event`. Both are pure functions of what checkpoints hold, so that a resumed run
judges, and decides, as the uninterrupted one would. Doing it is the loop's (core/training).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Progress

WARM_UP = 5
"""Losses seen before a loss can be called a spike."""
NAMED = 3
"""Layers that a reason names at most."""


class Diverged(ValueError):
    """Training went wrong and is not to go on; the message says at which step, why, and what is left."""


class Numerics(Protocol):
    """What fp8 does to one tensor; see core/precision/numerics."""

    @property
    def amax(self) -> float: ...
    @property
    def saturation(self) -> float: ...


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
    layers: tuple[str, ...] = ()
    """Modules that alone run in high precision; none: all."""
    skipped: tuple[int, ...] = ()
    """Global batches, counted from 0 in the order of the data, that are left out from now on."""
    verdict: str = ""
    """What is known after it, in words."""

    def record(self) -> dict[str, Any]:
        """The event as JSON, without what does not apply."""
        found = {name: value for name, value in asdict(self).items() if value not in (None, "", ())}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


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
    norms: list[float] = field(default_factory=list)
    """Their gradient norms."""
    streak: int = 0
    """Suspicious steps in a row."""
    affected: tuple[str, ...] = ()
    """Layers whose tensors saturated at the last look, when there was one."""

    def look(self, layers: Mapping[str, Mapping[Any, Numerics]]) -> None:
        """Note which layers are at fault; call before `judge`, in steps whose fp8 numbers were watched.

        Args:
            layers: Name to role to numbers, over all ranks the same.
        """
        limit = self.options.saturation_limit
        self.affected = tuple(
            name
            for name, roles in layers.items()
            if any(role.saturation > limit or not math.isfinite(role.amax) for role in roles.values())
        )

    def judge(self, loss: float, grad_norm: float, looked: bool = False) -> str:
        """Why this step is a divergence, or "" when it is none; remembers loss and gradient norm.

        Args:
            loss: Mean loss of the global batch, nats a token.
            grad_norm: Norm of its gradient before clipping.
            looked: Whether `look` has just seen this step.
        """
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        options = self.options
        is_warm = len(self.window) >= min(WARM_UP, options.spike_window)
        if is_warm and looked and self.affected:
            limit = f"saturation_limit {options.saturation_limit:g}"
            return f"{_names(self.affected)}: tensors saturate in fp8, or are not finite ({limit})"
        if is_warm and options.grad_norm_limit:
            mean = sum(self.norms) / len(self.norms)
            if grad_norm > options.grad_norm_limit * mean:
                return (
                    f"the gradient norm {grad_norm:.4g} is over {options.grad_norm_limit:g} times the recent mean "
                    f"{mean:.4g}"
                )
        if is_warm:
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
        self.norms = [*self.norms, grad_norm][-options.spike_window :]
        return ""

    @property
    def suspicious(self) -> bool:
        """Whether the last steps look bad without being a divergence yet: no time for a checkpoint."""
        return self.streak > 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        return {"window": list(self.window), "norms": list(self.norms), "streak": self.streak}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.window, self.norms = list(state["window"]), list(state["norms"])
        self.streak, self.affected = int(state["streak"]), ()


Response = Literal["stop", "fallback", "skip"]


def response(options: TrainingOptions, precision: str, is_fp8: bool, has_higher: bool) -> Response:
    """What a divergence is answered with.

    Raises:
        ValueError: fallback is asked for, and there is no higher precision.
    """
    if options.on_divergence == "auto":
        return "fallback" if is_fp8 and has_higher else "stop"
    if options.on_divergence == "fallback" and not has_higher:
        raise ValueError(f"on_divergence=fallback: there is no precision above {precision}; use skip or stop")
    return options.on_divergence


def decide(
    answer: Response,
    options: TrainingOptions,
    progress: Progress,
    reason: str,
    names: tuple[str, str],
    guard: Guard,
    good: int,
) -> Event:
    """What to do about a divergence in the step after `progress`.

    Args:
        answer: See `response`.
        options: The run's.
        progress: As it stands, the step not counted.
        reason: What `Guard.judge` said.
        names: Of the run's own precision, and of the one in force.
        guard: For the layers at fault.
        good: Steps done in the last good checkpoint.

    Returns:
        An event `rolled_back`, to be taken up by `take_up` once the checkpoint is loaded, or `stopped`.
    """
    step, (own, precision) = progress.step + 1, names
    in_replay = progress.step < progress.high_until
    if answer == "stop":
        return Event(step, "stopped", reason, precision, verdict=f"{precision} diverged, and on_divergence is to stop")
    if answer == "fallback" and in_replay and not progress.kept_out:
        verdict = f"{precision} diverges as well: the cause is not {own}"
        return Event(step, "stopped", reason, precision, verdict=verdict)
    if progress.retries >= options.fallback_retries:
        tried = "skips" if answer == "skip" else "fallbacks"
        verdict = f"{precision} diverged again after {progress.retries} {tried}"
        return Event(step, "stopped", reason, precision, verdict=verdict)
    if answer == "skip":
        last = data_step(progress.step, progress.skipped)
        first = max(data_step(good, progress.skipped), last - options.skip_batches + 1)
        window = tuple(index for index in range(first, last + 1) if index not in progress.skipped)
        return Event(step, "rolled_back", reason, precision, rolled_back_to=good, skipped=window)
    until = min(step + options.fallback_steps, options.steps)
    layers = guard.affected if options.fallback_layers == "affected" and not in_replay else ()
    return Event(step, "rolled_back", reason, precision, rolled_back_to=good, replay_until=until, layers=layers)


def take_up(event: Event, loaded: Progress, before: Progress) -> None:
    """Put a decision to go back into the progress of the checkpoint that was gone back to.

    Args:
        event: Of `decide`, `rolled_back`.
        loaded: The checkpoint's; changed.
        before: The progress at the divergence: decisions are remembered, whatever is gone back to.
    """
    loaded.retries = before.retries + 1
    loaded.skipped = sorted({*before.skipped, *event.skipped})
    loaded.high_until = event.replay_until or 0
    loaded.kept_out = list(event.layers)
    loaded.recovered_at = event.replay_until or event.step
    loaded.events = [*before.events, event.record()]


def recovery(progress: Progress, own: str, active: str) -> Event | None:
    """The event that a replay or a skip has passed the step of its divergence, when `progress` has just got there.

    Args:
        progress: After a step.
        own: Name of the run's own precision.
        active: Name of the one in force.
    """
    if not progress.step or progress.step != progress.recovered_at:
        return None
    cause = next(event for event in reversed(progress.events) if event["action"] == "rolled_back")
    if "skipped" in cause:
        first, last = cause["skipped"][0], cause["skipped"][-1]
        verdict = f"{own} diverged at step {cause['step']}, and does not without global batches {first} to {last}"
    else:
        verdict = f"{own} diverged at step {cause['step']} where {active} does not"
    return Event(progress.step, "recovered", cause["reason"], active, verdict=verdict)


def data_step(step: int, skipped: Iterable[int]) -> int:
    """The global batch, counted in the order of the data, that an optimizer step takes; both from 0.

    Args:
        step: Optimizer steps done before.
        skipped: Global batches that are left out.
    """
    for gone in sorted(skipped):
        if gone <= step:
            step += 1
    return step


def _names(layers: tuple[str, ...]) -> str:
    more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    return f"{', '.join(layers[:NAMED])}{more}"
