"""Which precision the training loop is in, and how it gets back from a step that went wrong.

What is to be done is core/guard's to decide, from numbers that are the same on every rank: so every rank converts,
goes back and replays alike. A model is converted in place, layer for layer, whether its parameters are whole or
sharded. Left out on purpose: what a checkpoint holds, and how it is loaded.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from crosstrain.components.core import telemetry
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.guard import Diverged, Event, Guard, decide, recovery, response, take_up
from crosstrain.components.core.parallel.world import World
from crosstrain.components.core.precision import Precision
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Progress

log = logging.getLogger(__name__)


class Recovery:
    """The precision in force, and the answer to a divergence, of one run."""

    def __init__(
        self,
        model: nn.Module,
        options: TrainingOptions,
        precision: Precision,
        guard: Guard,
        checkpoints: Checkpoints,
        world: World,
    ) -> None:
        """Nothing is converted yet.

        Args:
            model: Not converted.
            options: The run's.
            precision: The run's own.
            guard: Judges its steps.
            checkpoints: What is gone back to.
            world: The processes that train together.

        Raises:
            ValueError: a fallback is asked for, and there is no higher precision.
        """
        has_higher = precision.fallback() is not None
        self.answer = response(options, precision.name, precision.token_multiple > 1, has_higher)
        self._model, self._options, self._own, self._guard = model, options, precision, guard
        self._checkpoints, self._world = checkpoints, world
        self._active: Precision | None = None
        self._higher: dict[frozenset[str], Precision] = {}

    @property
    def active(self) -> Precision:
        """The precision in force."""
        assert self._active is not None
        return self._active

    def enter(self, progress: Progress) -> None:
        """Put the model into the precision of the step to come."""
        self.switch(self._of_step(progress), progress.step)

    def leave(self) -> None:
        """Make the model plain again."""
        if self._active is not None:
            self._active.restore(self._model)

    def _of_step(self, progress: Progress) -> Precision:
        """The run's own precision, or a higher one while a divergence is replayed."""
        if progress.step >= progress.high_until:
            return self._own
        kept_out = frozenset(progress.kept_out)
        if kept_out not in self._higher:
            higher = self._own.fallback(kept_out)
            assert higher is not None, "a replay was decided without a precision to do it in"
            self._higher[kept_out] = higher
        return self._higher[kept_out]

    def switch(self, precision: Precision, step: int) -> None:
        """Put the model into a precision after `step` steps."""
        if self._active is precision:
            return
        self.leave()
        changed = precision.convert(self._model)
        self._active = precision
        log.info("precision %s from step %d: %d linear layers", precision.name, step + 1, changed)

    def roll_back(self, reason: str, before: Progress, load: Callable[[int], Progress]) -> Progress:
        """Do what the guard decides about a divergence.

        Args:
            reason: What the guard said of the step.
            before: The progress, that step not counted.
            load: Puts the run where the checkpoint of a step has it.

        Returns:
            The progress to go on from.

        Raises:
            Diverged: the run is to stop.
        """
        good = self._checkpoints.steps()
        back_to = good[-1] if good else 0
        names = (self._own.name, self.active.name)
        event = decide(self.answer, self._options, before, reason, names, self._guard, back_to)
        self._tell(event)
        if event.action == "stopped":
            left = f"the last good checkpoint is of step {back_to}" if good else "no checkpoint was taken yet"
            raise Diverged(
                f"training diverged at step {event.step}: {reason}. {event.verdict}; {left} in "
                f"{self._checkpoints.uri}. Try a smaller learning_rate, a longer warm-up, or a higher precision"
            )
        loaded = load(back_to)
        take_up(event, loaded, before)
        return loaded

    def note(self, progress: Progress) -> None:
        """Add the event that a replay or a skip has passed the step of its divergence, when it just has."""
        if event := recovery(progress, self._own.name, self.active.name):
            progress.events.append(self._tell(event))

    def _tell(self, event: Event) -> dict[str, Any]:
        """Write a decision to the log and the run's events; it as JSON."""
        record = event.record()
        if self._world.first:
            log.warning("guard: %s", json.dumps(record))
            telemetry.emit("guard", **record)
        return record
