"""fp8 by torchao's float8 training: nn.Linear becomes Float8Linear, with the very same parameters.

Scaling is current: the amax of a tensor (or row) is taken as it is cast, so there is no state between steps.
On a CPU torchao's emulation quantises every operand to real E4M3 and E5M2 bits and multiplies in fp32; the
activations between the linears are fp32 as well. That shows fp8's numerics, and says nothing about its
speed; it goes by the name `fp8-torchao-emulated`. On a GPU with fp8 units (compute capability 8.9 and up)
the products run on them, between bf16 activations.

Three things here are known to bite. torchao loses the chosen recipe when `emulate=True` is passed beside its
name, so it is set on the finished configuration. Hardware wants dimensions and token counts in multiples of 16;
emulation takes any size, so that a run on a CPU would never notice: both are checked, on every device. And one
Inf makes torchao's whole output NaN, where TransformerEngine scales such a tensor by 1 and saturates.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import Float8LinearRecipeName
from torchao.float8.float8_linear import Float8Linear

from crosstrain.components.core.precision.base import RecipeName
from crosstrain.components.core.precision.device import require_fp8_units
from crosstrain.components.core.precision.fp8 import Fp8


class TorchaoFp8(Fp8):
    """E4M3 weights and activations, E5M2 gradients (rowwise: E4M3), in the linears of the decoder blocks."""

    def __init__(
        self, device: torch.device, recipe: RecipeName, keep_first: int, keep_last: int, minimum_features: int
    ) -> None:
        super().__init__(device, recipe, keep_first, keep_last, minimum_features)
        require_fp8_units(device, recipe)
        self.name = "fp8-torchao-emulated" if self.emulated else "fp8-torchao"
        own = Float8LinearRecipeName.ROWWISE if recipe == "rowwise" else Float8LinearRecipeName.TENSORWISE
        self._config = replace(Float8LinearConfig.from_recipe_name(own), emulate=self.emulated)

    def _make_layer(self, linear: nn.Linear, name: str) -> nn.Module:
        return Float8Linear.from_float(linear, self._config)

    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        return nullcontext() if self.emulated else torch.autocast(self.device.type, torch.bfloat16)
