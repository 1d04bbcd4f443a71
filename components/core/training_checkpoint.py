"""What a checkpoint of the training loop means: put together from the loop's parts, and put back.

Weights and optimizer moments are tensors in whatever layout; progress and guard are the same on every rank; the
random state and delayed fp8 scales are each rank's own. Resumed in the layout that saved it, a run goes on to the
bit. In another one it sees the same samples at the same steps, its sums differ in their last bits, its dropout is
seeded anew from seed and step, and delayed scales start anew, because the old ranks' states belong to parts of the
batch that are no more.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.guard import Guard
from crosstrain.components.core.optimization import moments
from crosstrain.components.core.parallel.engine import Engine
from crosstrain.components.core.parallel.layout import Layout
from crosstrain.components.core.precision import Precision
from crosstrain.components.core.reproducible import random_state, seed_rank, set_random_state
from crosstrain.components.core.training_state import Progress


@dataclass(frozen=True)
class Parts:
    """What of a run is saved, beside its progress."""

    engine: Engine
    guard: Guard
    precision: Precision
    layout: Layout
    seed: int

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = self.engine.parameters
        return {
            **{f"parameter.{name}": item.detach() for name, item in named.items()},
            **moments(self.engine.optimizer, named),
        }

    def save(self, checkpoints: Checkpoints, progress: Progress) -> None:
        """Take a checkpoint of the run as it is."""
        notes = {"layout": self.layout.degrees(), "guard": self.guard.state(), "progress": asdict(progress)}
        loss = progress.history[-1]["loss"] if progress.history else None
        checkpoints.save(progress.step, self._tensors(), notes, self._own(), loss)

    def _own(self) -> dict[str, Any]:
        return {"random": random_state(), "scaling": self.precision.state()}

    def load(self, checkpoints: Checkpoints, step: int) -> Progress:
        """Put everything where the checkpoint of `step` has it; the progress then."""
        notes, own = checkpoints.load(step, self._tensors())
        self.guard.restore(notes["guard"])
        if own is not None and notes["layout"] == self.layout.degrees():
            set_random_state(own["random"])
            self.precision.load_state(own["scaling"])
        else:
            seed_rank(self.seed, step, self.engine.data_rank)
            self.precision.load_state({})
        return Progress(**notes["progress"])
