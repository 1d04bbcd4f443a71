"""The interface that precision backends fill, and the choice among them. Nothing here imports torch at its top."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig

    from crosstrain.components.core.precision.numerics import Watch

PrecisionName = Literal["fp8", "bf16", "fp32"]
RecipeName = Literal["tensorwise", "rowwise", "delayed", "current", "block", "mxfp8"]
BackendName = Literal["torchao", "torchao, emulated", "reference, emulated", "TransformerEngine"]

BACKENDS: dict[RecipeName, dict[str, BackendName]] = {
    "tensorwise": {"cpu": "torchao, emulated", "cuda": "torchao"},
    "rowwise": {"cpu": "torchao, emulated", "cuda": "torchao"},
    "current": {"cpu": "torchao, emulated", "cuda": "TransformerEngine"},
    "delayed": {"cpu": "reference, emulated", "cuda": "TransformerEngine"},
    "block": {"cpu": "reference, emulated", "cuda": "TransformerEngine"},
    "mxfp8": {"cpu": "reference, emulated", "cuda": "TransformerEngine"},
}
"""Which backend runs a recipe on a type of device. `current` and `tensorwise` are one formula under the names that
TransformerEngine and torchao give it."""


@dataclass(frozen=True)
class Surroundings:
    """What a run does around the arithmetic, as far as a backend has to know."""

    tensor_parallel: int = 1
    """Ranks that a layer's weight is cut over."""
    fsdp: bool = False
    """Whether FSDP2 shards the parameters."""
    recompute: bool = False
    """Whether activations are recomputed in backward."""
    compile: bool = False
    """Whether forward and backward are compiled."""


ALONE = Surroundings()
"""One process, nothing recomputed, nothing compiled."""


class Precision(ABC):
    """A number format to train in. Parameters stay fp32; what a backend changes is the arithmetic."""

    name: str
    """What manifests and reports call it; never claims what the hardware does not do."""
    token_multiple: int = 1
    """Tokens of a micro-batch must be a multiple of this."""
    emulated: bool = False
    """Whether the format is imitated in fp32, so that its speed says nothing."""

    def check(  # noqa: B027
        self, config: "PretrainedConfig", around: Surroundings = ALONE
    ) -> None:
        """Refuse, before anything is built, a model or a way to run it that this format cannot hold.

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
    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        """The context that one forward pass runs in; backward runs outside it.

        Args:
            first_micro_batch: Whether the weights have changed since the pass before. A backend that can then keeps
                their fp8 form from the first micro-batch of a step to its others; None: keep nothing.
        """

    def reduce_over(self, group: "ProcessGroup") -> None:  # noqa: B027
        """Take amaxes as the largest over a group of ranks, where scales outlive a step; call before training."""

    def state(self) -> dict[str, "torch.Tensor"]:
        """What scaling carries from step to step, for checkpoints only: plain CPU tensors by name, {} when nothing.

        It belongs to this object: it stands while the model is in another precision, and is taken up again with the
        next `convert`. Exported weights never hold it.
        """
        return {}

    def load_state(self, state: Mapping[str, "torch.Tensor"]) -> None:  # noqa: B027
        """Take up a saved state; layers that it lacks start anew, with a warning. Before or after `convert`.

        Raises:
            ValueError: a tensor has the wrong shape: it was saved under another recipe.
        """

    def watch(self, model: "nn.Module") -> AbstractContextManager["Watch"]:
        """Observe what fp8 does to the tensors of the forward and backward passes inside; changes no number."""
        from crosstrain.components.core.precision.numerics import Watch

        return nullcontext(Watch())

    def fallback(self, affected: frozenset[str] = frozenset()) -> "Precision | None":
        """The precision to replay a divergence in, None when there is none.

        Args:
            affected: Names of modules that alone leave fp8; none: every module does.
        """
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
    amax_history: int = 1024,
) -> Precision:
    """The backend for a precision on a device; see BACKENDS.

    Args:
        name: `fp32`, `bf16` or `fp8`.
        device: Where the model is trained.
        recipe: How fp8 tensors are scaled.
        keep_first: Decoder blocks at the input end whose linears stay out of fp8.
        keep_last: Decoder blocks at the output end whose linears stay out of fp8.
        minimum_features: Linears with fewer input or output features stay out of fp8.
        amax_history: Amaxes that recipe `delayed` looks back on.

    Raises:
        ValueError: the device cannot do it, with the reason and what to ask for instead.
    """
    from crosstrain.components.core.precision.plain import Bf16, Fp32

    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16(device)
    if device.type not in BACKENDS[recipe]:
        raise ValueError(f"precision fp8: {device.type} devices are not supported; use precision bf16")
    chosen: dict[str, Any] = {
        "device": device,
        "recipe": recipe,
        "keep_first": keep_first,
        "keep_last": keep_last,
        "minimum_features": minimum_features,
    }
    backend = BACKENDS[recipe][device.type]
    if backend == "TransformerEngine":
        from crosstrain.components.core.precision.transformer_engine import TransformerEngineFp8

        return TransformerEngineFp8(**chosen, amax_history=amax_history)
    if backend == "reference, emulated":
        from crosstrain.components.core.precision.emulated import EmulatedFp8

        return EmulatedFp8(**chosen, amax_history=amax_history)
    from crosstrain.components.core.precision.torchao import TorchaoFp8

    return TorchaoFp8(**chosen)
