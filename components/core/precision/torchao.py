"""fp8 by torchao's float8 training: nn.Linear becomes Float8Linear, with the very same parameters.

Scaling is current: the amax of a tensor (or row) is taken as it is cast, so there is no state between steps.
On a CPU torchao's emulation quantises every operand to real E4M3 and E5M2 bits and multiplies in fp32; the
activations between the linears are fp32 as well. That shows fp8's numerics, and says nothing about its
speed; it goes by the name `fp8-torchao-emulated`. On a GPU with fp8 units (compute capability 8.9 and up)
the products run on them, between bf16 activations.

Two things here are known to bite. torchao loses the chosen recipe when `emulate=True` is passed beside its
name, so it is set on the finished configuration. Hardware wants dimensions and token counts in multiples of 16;
emulation takes any size, so that a run on a CPU would never notice: both are checked here, on every device.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import PretrainedConfig, PreTrainedModel

from crosstrain.components.core.precision.base import Precision, RecipeName
from crosstrain.components.core.precision.plain import Bf16, Fp32

ALIGNMENT = 16
"""What fp8 matrix units take each dimension in multiples of."""
FIRST_CAPABILITY = (8, 9)
"""CUDA compute capability from which there are fp8 matrix units: Ada, then Hopper (9.0)."""


class TorchaoFp8(Precision):
    """E4M3 weights and activations, E5M2 gradients (rowwise: E4M3), in the linears of the decoder blocks."""

    token_multiple = ALIGNMENT

    def __init__(
        self, device: torch.device, recipe: RecipeName, keep_first: int, keep_last: int, minimum_features: int
    ) -> None:
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
            raise ValueError(
                f"precision fp8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]} "
                "and no fp8 units, which begin at 8.9; use precision bf16 on it, or an L4, L40S, H100 or newer"
            )
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"precision fp8: {device.type} devices are not supported; use precision bf16")
        self.emulated = device.type == "cpu"
        self.name = "fp8-torchao-emulated" if self.emulated else "fp8-torchao"
        self._device = device
        self._config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=self.emulated)
        self._keep_first, self._keep_last = keep_first, keep_last
        self._minimum_features = minimum_features

    def check(self, config: PretrainedConfig) -> None:
        for name, features in _dimensions(config).items():
            if features >= self._minimum_features and features % ALIGNMENT:
                low = features // ALIGNMENT * ALIGNMENT
                near = " or ".join(str(value) for value in (low, low + ALIGNMENT) if value)
                raise ValueError(
                    f"fp8 takes dimensions in multiples of {ALIGNMENT}: {name} is {features}; nearest: {near}"
                )
        if config.attention_bias or config.mlp_bias:
            raise ValueError(
                "fp8: attention_bias and mlp_bias must be false, or pads could not be kept out of the scales"
            )
        if self._keep_first + self._keep_last >= config.num_hidden_layers:
            raise ValueError(
                f"fp8: keeping the first {self._keep_first} and last {self._keep_last} blocks out of fp8 leaves none "
                f"of {config.num_hidden_layers}; keep fewer"
            )

    def convert(self, model: nn.Module) -> int:
        chosen = self._choose_linears(model)
        if not chosen:
            raise ValueError(
                f"fp8: no linear has {self._minimum_features} input and output features or more, so nothing would "
                "run in fp8; use a larger model or a smaller fp8_minimum_features"
            )
        convert_to_float8_training(
            model, config=self._config, module_filter_fn=lambda module, name: id(module) in chosen
        )
        return len(chosen)

    def _choose_linears(self, model: nn.Module) -> set[int]:
        """Identities of the linears that go to fp8: wide enough, in a block that is not kept out."""
        blocks: nn.ModuleList = cast(PreTrainedModel, model).get_decoder().layers
        return {
            id(module)
            for block in blocks[self._keep_first : len(blocks) - self._keep_last]
            for module in block.modules()
            if type(module) is nn.Linear and min(module.weight.shape) >= self._minimum_features
        }

    def restore(self, model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, Float8Linear):
                model.set_submodule(name, _plain(module))

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.emulated else torch.autocast(self._device.type, torch.bfloat16)

    def fallback(self) -> Precision:
        return Fp32() if self.emulated else Bf16(self._device)


def _dimensions(config: PretrainedConfig) -> dict[str, int]:
    """Features of the linears in a Llama block, by the fields that set them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads x head_dim": config.num_attention_heads * head,
        "num_key_value_heads x head_dim": config.num_key_value_heads * head,
    }


def _plain(module: Float8Linear) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(module.in_features, module.out_features, bias=False)
    linear.weight, linear.bias = module.weight, module.bias
    return linear.train(module.training)
