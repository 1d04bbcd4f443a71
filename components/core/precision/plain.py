"""fp32, and bf16 by autocast.

bf16 here means fp32 parameters and optimizer state with matrix products in bf16: small updates are not
lost in the parameters' rounding, and the saved weights are the trained ones, bit for bit. A CPU without
AMX multiplies bf16 about four times slower than fp32; it is the control arm there, not a way to save time.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from crosstrain.components.core.precision.base import Precision


class Fp32(Precision):
    """Everything in fp32."""

    name = "fp32"

    def convert(self, model: nn.Module) -> int:
        return 0

    def restore(self, model: nn.Module) -> None:
        pass

    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        return nullcontext()


class Bf16(Fp32):
    """fp32 parameters, matrix products in bf16 under torch.autocast."""

    name = "bf16"

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        return torch.autocast(self._device, torch.bfloat16)

    def fallback(self, affected: frozenset[str] = frozenset()) -> Precision:
        return Fp32()
