"""What every fp8 backend shares: which linears go over, how they go and come back, what does not fit, what is watched.

A linear goes over in place: it takes the class of the backend's layer and the attributes that such a layer has, and
keeps its identity, parameters, hooks and name. So the swap is exact both ways, state dicts keep Hugging Face's keys,
and whoever holds the module (FSDP2, a tensor-parallel plan, peft) holds the right one before and after.
lm_head is in no decoder block and never goes over.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from crosstrain.components.core.precision.base import ALONE, Precision, RecipeName, Surroundings
from crosstrain.components.core.precision.numerics import Watch
from crosstrain.components.core.precision.plain import Bf16, Fp32
from crosstrain.components.core.precision.recipes import RECIPES

_OWN = "_plain_attributes"
"""Where a converted linear remembers the attributes it had."""


class Fp8(Precision):
    """A recipe applied to the linears of the decoder blocks."""

    def __init__(
        self, device: torch.device, recipe: RecipeName, keep_first: int, keep_last: int, minimum_features: int
    ) -> None:
        self.device, self.recipe_name, self.recipe = device, recipe, RECIPES[recipe]
        self.keep_first, self.keep_last, self.minimum_features = keep_first, keep_last, minimum_features
        self.token_multiple = self.recipe.alignment
        self.emulated = device.type == "cpu"

    def check(self, config: PretrainedConfig, around: Surroundings = ALONE) -> None:
        multiple = self.recipe.alignment
        for name, features in _dimensions(config).items():
            if features >= self.minimum_features and features % multiple:
                low = features // multiple * multiple
                near = " or ".join(str(value) for value in (low, low + multiple) if value)
                raise ValueError(
                    f"fp8_recipe {self.recipe_name} takes dimensions in multiples of {multiple}: {name} is {features}; "
                    f"nearest: {near}"
                )
        if self.recipe.delayed and around.recompute:
            raise ValueError(
                "fp8_recipe delayed: activations recomputed in backward would be cast with other scales than in "
                "forward; use fp8_recipe current, or do without activation checkpointing"
            )
        if config.attention_bias or config.mlp_bias:
            raise ValueError(
                "fp8: attention_bias and mlp_bias must be false, or pads could not be kept out of the scales"
            )
        if self.keep_first + self.keep_last >= config.num_hidden_layers:
            raise ValueError(
                f"fp8: keeping the first {self.keep_first} and last {self.keep_last} blocks out of fp8 leaves none "
                f"of {config.num_hidden_layers}; keep fewer"
            )

    def convert(self, model: nn.Module) -> int:
        chosen = self.choose_linears(model)
        if not chosen:
            raise ValueError(
                f"fp8: no linear has {self.minimum_features} input and output features or more, so nothing would "
                "run in fp8; use a larger model or a smaller fp8_minimum_features"
            )
        for name, linear in chosen.items():
            become(linear, self._make_layer(linear, name))
        self._converted(chosen)
        return len(chosen)

    @abstractmethod
    def _make_layer(self, linear: nn.Linear, name: str) -> nn.Module:
        """The backend's layer for a linear, without storage of its own: its parameters are not used."""

    def _converted(self, linears: dict[str, nn.Linear]) -> None:
        """Called when `linears` have gone over."""

    def _restoring(self, linears: dict[str, nn.Linear]) -> None:
        """Called before `linears` come back."""

    def choose_linears(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The plain linears that go to fp8, by name: wide enough, in a block that is not kept out."""
        blocks: nn.ModuleList = cast(PreTrainedModel, model).get_decoder().layers
        inside = {
            id(module)
            for block in blocks[self.keep_first : len(blocks) - self.keep_last]
            for module in block.modules()
            if type(module) is nn.Linear and min(module.weight.shape) >= self.minimum_features
        }
        return {
            name: cast(nn.Linear, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if id(module) in inside
        }

    def converted_linears(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The linears of a model that are in fp8, by name."""
        return {name: cast(nn.Linear, module) for name, module in model.named_modules() if _OWN in module.__dict__}

    def restore(self, model: nn.Module) -> None:
        linears = self.converted_linears(model)
        self._restoring(linears)
        for linear in linears.values():
            become_plain(linear)

    def watch(self, model: nn.Module) -> AbstractContextManager[Watch]:
        return Watch(self.recipe, self._scale).hooked(self.converted_linears(model))

    def _scale(self, name: str, role: str) -> torch.Tensor | None:
        """The scale that the next cast of a layer's tensor takes, None when it is made of the tensor itself."""
        return None

    def fallback(self, affected: frozenset[str] = frozenset()) -> Precision:
        plain = Fp32() if self.emulated else Bf16(self.device)
        return Partial(self, plain, affected) if affected else plain


class Partial(Precision):
    """An fp8 precision of which some modules are kept in the higher one."""

    def __init__(self, inner: Fp8, plain: Precision, kept: frozenset[str]) -> None:
        self.inner, self.kept, self._plain = inner, kept, plain
        self.name = f"{inner.name}, {len(kept)} modules in {plain.name}"
        self.token_multiple, self.emulated = inner.token_multiple, inner.emulated

    def convert(self, model: nn.Module) -> int:
        count = self.inner.convert(model)
        left = {name: linear for name, linear in self.inner.converted_linears(model).items() if name in self.kept}
        self.inner._restoring(left)
        for linear in left.values():
            become_plain(linear)
        return count - len(left)

    def restore(self, model: nn.Module) -> None:
        self.inner.restore(model)

    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        return self.inner.autocast(first_micro_batch)

    def watch(self, model: nn.Module) -> AbstractContextManager[Watch]:
        return self.inner.watch(model)

    def fallback(self, affected: frozenset[str] = frozenset()) -> Precision:
        return self._plain


def become(linear: nn.Linear, layer: nn.Module) -> None:
    """Turn a linear into a layer of another class in place; its parameters and hooks stay."""
    before = set(linear.__dict__)
    for name, value in layer.__dict__.items():
        if name not in before:
            linear.__dict__[name] = value
    linear.__dict__[_OWN] = frozenset(before)
    cast(nn.Module, linear).__class__ = type(layer)


def become_plain(linear: nn.Linear) -> None:
    """Undo `become`."""
    before = linear.__dict__[_OWN]
    for name in set(linear.__dict__) - before:
        del linear.__dict__[name]
    linear.__class__ = nn.Linear


def _dimensions(config: PretrainedConfig) -> dict[str, int]:
    """Features of the linears in a Llama block, by the fields that set them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads x head_dim": config.num_attention_heads * head,
        "num_key_value_heads x head_dim": config.num_key_value_heads * head,
    }
