"""The interface that precision backends fill, and the choice among them."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

PrecisionName = Literal["fp8", "bf16", "fp32"]
RecipeName = Literal["tensorwise", "rowwise"]


class Precision(ABC):
    """A number format to train in. Parameters stay fp32; what a backend changes is the arithmetic."""

    name: str
    """What manifests and reports call it; never claims what the hardware does not do."""
    token_multiple: int = 1
    """Tokens of a micro-batch must be a multiple of this."""
    emulated: bool = False
    """Whether the format is imitated in fp32, so that its speed says nothing."""

    def check(self, config: "PretrainedConfig") -> None:  # noqa: B027
        """Refuse, before anything is built, a model that this format cannot hold.

        Raises:
            ValueError: names the field of the model's configuration and the nearest possible values.
        """

    @abstractmethod
    def convert(self, model: "nn.Module") -> int:
        """Switch a Hugging Face causal LM, peft-wrapped or not, over in place; the number of layers that changed."""

    @abstractmethod
    def restore(self, model: "nn.Module") -> None:
        """Undo `convert` in place, exactly: plain modules with the very same parameters."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[object]:
        """The context that forward passes run in."""

    def fallback(self) -> "Precision | None":
        """The higher precision to replay a divergence in, None when there is none."""
        return None

    @property
    def speed_name(self) -> str:
        """Name of the throughput metric: emulation's speed is never shown as the format's own."""
        return "emulation_tokens_per_second" if self.emulated else "tokens_per_second"


def choose(
    name: PrecisionName,
    device: "torch.device",
    *,
    recipe: RecipeName = "tensorwise",
    keep_first: int = 0,
    keep_last: int = 0,
    minimum_features: int = 32,
) -> Precision:
    """The backend for a precision on a device.

    Args:
        name: `fp32`, `bf16` or `fp8`.
        device: Where the model is trained.
        recipe: How fp8 tensors are scaled: one scale a tensor, or one a row.
        keep_first: Decoder blocks at the input end whose linears stay out of fp8.
        keep_last: Decoder blocks at the output end whose linears stay out of fp8.
        minimum_features: Linears with fewer input or output features stay out of fp8.

    Raises:
        ValueError: the device cannot do it, with the reason and what to ask for instead.
    """
    from crosstrain.components.core.precision.plain import Bf16, Fp32

    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16(device)
    from crosstrain.components.core.precision.torchao import TorchaoFp8

    return TorchaoFp8(device, recipe, keep_first, keep_last, minimum_features)
