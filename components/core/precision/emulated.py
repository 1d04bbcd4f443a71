"""The scaling recipes that torchao has not, as a reference on the CPU: delayed, block and mxfp8.

Every operand goes to real fp8 bits by the arithmetic of `recipes`, and is multiplied in fp32; between the linears
everything is fp32. That shows a recipe's numerics as TransformerEngine documents them, and says nothing about its
speed. The names say `emulated`.

Delayed scaling is TransformerEngine's, in its order: amaxes are noted with every cast, validation's too; scales of
inputs and weights move on when a forward pass with gradients ends (`autocast`), those of gradients when the backward
of the first layer does; each after a maximum over the ranks, where a group is given. So with gradient accumulation
they move once a micro-batch. Casts where a matrix and its transpose differ (1 x 128, 1 x 32) are made twice, both
from the high-precision matrix.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import distributed, nn
from transformers import PretrainedConfig

from crosstrain.components.core.precision.base import ALONE, RecipeName, Surroundings
from crosstrain.components.core.precision.delayed import SIZES, Scales, load_tensor, update_history
from crosstrain.components.core.precision.fp8 import Fp8
from crosstrain.components.core.precision.recipes import Quantised, Role, amax_of, cast_matrix


class EmulatedFp8(Fp8):
    """A reference recipe in the linears of the decoder blocks, on the CPU."""

    def __init__(
        self,
        device: torch.device,
        recipe: RecipeName,
        keep_first: int = 0,
        keep_last: int = 0,
        minimum_features: int = 32,
        amax_history: int = 1024,
    ) -> None:
        super().__init__(device, recipe, keep_first, keep_last, minimum_features)
        self.name = f"fp8-{recipe}-emulated"
        self._length = amax_history
        self.scales: dict[str, Scales] = {}
        self._group: distributed.ProcessGroup | None = None
        self._is_first = False

    def check(self, config: PretrainedConfig, around: Surroundings = ALONE) -> None:
        super().check(config, around)
        if around.tensor_parallel > 1:
            raise ValueError(
                f"fp8_recipe {self.recipe_name} is emulated on whole layers only; with tensor_parallel "
                f"{around.tensor_parallel} use fp8_recipe tensorwise"
            )

    def _make_layer(self, linear: nn.Linear, name: str) -> nn.Module:
        layer = EmulatedLinear(linear.in_features, linear.out_features, bias=False, device="meta")
        layer.owner, layer.layer_name = self, name
        return layer

    def _converted(self, linears: dict[str, nn.Linear]) -> None:
        if self.recipe.delayed:
            for name in linears:
                self.scales.setdefault(name, Scales(self._length))

    @contextmanager
    def autocast(self, first_micro_batch: bool | None = None) -> Iterator[None]:
        self._is_first = True
        yield
        if torch.is_grad_enabled():
            self.update("forward")

    def take_first(self) -> bool:
        """Whether this is the first layer of a forward pass: the last one of its backward."""
        was, self._is_first = self._is_first, False
        return was

    def update(self, side: str) -> None:
        """Move delayed scales of forward or backward on by a pass."""
        if not self.scales:
            return
        rows = [scales.history[side][0] for scales in self.scales.values()]
        if self._group is not None and self._group.size() > 1:
            together = torch.cat(rows)
            distributed.all_reduce(together, distributed.ReduceOp.MAX, group=self._group)
            for row, part in zip(rows, together.split([len(row) for row in rows]), strict=True):
                row.copy_(part)
        formats = (self.recipe.formats["input" if side == "forward" else "gradient"],) * SIZES[side]
        for scales in self.scales.values():
            update_history(scales.history[side], scales.scale[side], formats)

    def cast(self, matrix: torch.Tensor, role: Role, name: str) -> Quantised:
        """A matrix in fp8 as the recipe wants it."""
        if not self.recipe.delayed:
            return cast_matrix(matrix, role, self.recipe)
        scales = self.scales[name]
        scales.note(role, amax_of(matrix))
        return cast_matrix(matrix, role, self.recipe, scales.of(role))

    def reduce_over(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{kind}_{side}": values[side].clone()
            for name, scales in self.scales.items()
            for kind, values in (("scale", scales.scale), ("amax_history", scales.history))
            for side in ("forward", "backward")
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if not self.recipe.delayed:
            return
        names = {key.rpartition(".")[0] for key in state} | set(self.scales)
        for name in sorted(names):
            self.scales[name] = scales = Scales(self._length)
            for kind, values in (("scale", scales.scale), ("amax_history", scales.history)):
                for side, value in values.items():
                    load_tensor(value, state, f"{name}.{kind}_{side}")

    def _scale(self, name: str, role: str) -> torch.Tensor | None:
        return self.scales[name].of(cast(Role, role)) if self.recipe.delayed else None


class EmulatedLinear(nn.Linear):
    """A linear whose three products take operands that went through fp8."""

    owner: EmulatedFp8
    layer_name: str

    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        output: torch.Tensor = _Product.apply(input, self.weight, self.bias, self)
        return output


class _Product(torch.autograd.Function):
    """x @ weight.T + bias and its gradients, over quantised operands."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: EmulatedLinear
    ) -> torch.Tensor:
        owner, name = layer.owner, layer.layer_name
        matrix = x.reshape(-1, x.shape[-1])
        ctx.is_first, ctx.layer = owner.take_first(), layer
        x_q, weight_q = owner.cast(matrix, "input", name), owner.cast(weight, "weight", name)
        ctx.x = x_q if owner.recipe.is_square("input") else owner.cast(matrix.t(), "input", name)
        ctx.weight = weight_q if owner.recipe.is_square("weight") else owner.cast(weight.t(), "weight", name)
        output = x_q.dequantise() @ weight_q.dequantise().t()
        if bias is not None:
            output += bias
        return output.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner, name = ctx.layer.owner, ctx.layer.layer_name
        matrix = gradient.reshape(-1, gradient.shape[-1])
        gradient_q = owner.cast(matrix, "gradient", name)
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.weight.dequantise()
            weight = weight if owner.recipe.is_square("weight") else weight.t()
            for_x = (gradient_q.dequantise() @ weight).reshape(*gradient.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            is_square = owner.recipe.is_square("gradient")
            turned = gradient_q.dequantise().t() if is_square else owner.cast(matrix.t(), "gradient", name).dequantise()
            x = ctx.x.dequantise()
            for_weight = turned @ (x if owner.recipe.is_square("input") else x.t())
        if ctx.needs_input_grad[2]:
            for_bias = matrix.sum(0)
        if ctx.is_first:
            owner.update("backward")
        return for_x, for_weight, for_bias, None
