"""Delayed scaling: scales made of the amaxes of earlier passes, and what a checkpoint holds of them.

To TransformerEngine's semantics, where they are exact: its delayed_scaling.cu and FP8GlobalStateManager. The first
pass has scale 1, which flushes small gradients to zero; see docs/fp8.md.
"""

import logging
from collections.abc import Mapping

import torch

from crosstrain.components.core.precision.recipes import LARGEST_FP32, Format, Role

log = logging.getLogger(__name__)

SIZES = {"forward": 3, "backward": 2}
"""Delayed scales of a layer, as TransformerEngine has them: input, weight, output; gradients of output and input."""
SLOTS: dict[Role, tuple[str, int]] = {"input": ("forward", 0), "weight": ("forward", 1), "gradient": ("backward", 0)}
"""Which of them the recipe uses."""


class Scales:
    """A layer's delayed scales and amax histories."""

    def __init__(self, length: int) -> None:
        self.scale = {side: torch.ones(size) for side, size in SIZES.items()}
        self.history = {side: torch.zeros(length, size) for side, size in SIZES.items()}

    def of(self, role: Role) -> torch.Tensor:
        """The scale for the next cast, [1, 1]."""
        side, place = SLOTS[role]
        return self.scale[side][place].clone().reshape(1, 1)

    def note(self, role: Role, amax: torch.Tensor) -> None:
        """Remember an amax for the next update."""
        side, place = SLOTS[role]
        row = self.history[side][0]
        row[place] = torch.maximum(row[place], amax.reshape(()))


def update_history(history: torch.Tensor, scale: torch.Tensor, formats: tuple[Format, ...]) -> None:
    """Move delayed scales on by one pass, in place.

    The amax of the pass lies in row 0. Where it is 0, nothing was cast: the history stays. Else the history rolls
    and row 0 is cleared for the next pass. The scale becomes largest / (largest amax in the history), or stays as it
    is while that is not finite: one Inf freezes it until it has rolled out.

    Args:
        history: Amaxes [length, tensors], fp32.
        scale: [tensors], fp32.
        formats: Of each tensor.
    """
    is_new, amax = history[0] != 0, history.amax(0)
    moved = history.roll(-1, 0)
    moved[0] = 0.0
    history.copy_(torch.where(is_new, moved, history))
    largest = torch.tensor([format.largest for format in formats], dtype=scale.dtype, device=scale.device)
    wanted = (largest / amax).clamp(max=LARGEST_FP32)
    scale.copy_(torch.where(is_new & amax.isfinite(), wanted, scale))


def load_tensor(value: torch.Tensor, state: Mapping[str, torch.Tensor], key: str) -> None:
    """Copy a saved tensor of scaling state over `value`; where it alone is missing, warn and leave it.

    Raises:
        ValueError: it has another shape.
    """
    if not state:
        return
    if key not in state:
        log.warning("%s is not in the checkpoint: its scaling starts anew", key)
    elif state[key].shape != value.shape:
        raise ValueError(
            f"{key} in the checkpoint has shape {list(state[key].shape)} and this run wants {list(value.shape)}: it "
            "was saved under another fp8_recipe or fp8_amax_history"
        )
    else:
        value.copy_(state[key])
