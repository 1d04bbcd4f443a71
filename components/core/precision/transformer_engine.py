"""fp8 by NVIDIA's TransformerEngine on a GPU: nn.Linear becomes te.Linear, with the very same parameters.

Parameters stay fp32 and are cast with every step; nothing is initialised in fp8. Written against
TransformerEngine 2.20 and checked against its Python source, name by name, in a test; never run by us (see
docs/fp8.md). So this module is thin: TransformerEngine does the work, and what is here is what to ask it for.

What is known to bite, and where it is met. A module's pickled `_extra_state` is in no state dict of ours: our
layer has none, and delayed scales travel as plain tensors by `state`. FP8 weights are kept from a step's first
micro-batch to its others, and never beyond: not in validation, not under FSDP2, torch.compile or recomputation. Tensor
parallelism is refused, because TransformerEngine's layers hold plain local shards, where the rest of the model
holds DTensors. Importing TransformerEngine without a GPU fails in several ways; all become one error.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from crosstrain.components.core.precision.base import ALONE, RecipeName, Surroundings
from crosstrain.components.core.precision.delayed import SIZES, SLOTS, load_tensor
from crosstrain.components.core.precision.device import require_fp8_units
from crosstrain.components.core.precision.fp8 import Fp8
from crosstrain.components.core.precision.recipes import Role

INSTALL = 'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]>=2.20,<2.21"'
META = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""Where TransformerEngine keeps the delayed scales of a layer, by pass."""
CHANGING = ("NVTE_BACKWARD_OVERRIDE", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
"""Environment variables that make another recipe of the one that is asked for."""


class TransformerEngineFp8(Fp8):
    """A recipe of TransformerEngine in the linears of the decoder blocks."""

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
        require_fp8_units(device, recipe)
        self.name = f"fp8-transformer-engine-{recipe}"
        self._te, formats = load()
        if not (ready := self._available())[0]:
            raise ValueError(
                f"fp8_recipe {recipe}: TransformerEngine refuses it here: {ready[1]} Use fp8_recipe tensorwise, or "
                "precision bf16"
            )
        self._scaling = make_recipe(formats, recipe, amax_history)
        self._length = amax_history
        self._layers: dict[str, Any] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._group: ProcessGroup | None = None
        self._caches_weights = False
        self.first_micro_batch: bool | None = None
        self.is_inside = False

    def _available(self) -> tuple[bool, str]:
        te = self._te
        if self.recipe_name == "block":
            return cast(tuple[bool, str], te.is_fp8_block_scaling_available(return_reason=True))
        if self.recipe_name == "mxfp8":
            return cast(tuple[bool, str], te.is_mxfp8_available(return_reason=True))
        return cast(tuple[bool, str], te.is_fp8_available(return_reason=True))

    def check(self, config: PretrainedConfig, around: Surroundings = ALONE) -> None:
        super().check(config, around)
        if around.tensor_parallel > 1:
            raise ValueError(
                f"fp8_recipe {self.recipe_name} runs on TransformerEngine, which this version does not cut over "
                f"tensor-parallel ranks (tensor_parallel {around.tensor_parallel}); use fp8_recipe tensorwise"
            )
        if self.recipe.delayed and around.compile:
            raise ValueError(
                "fp8_recipe delayed: TransformerEngine refuses it under torch.compile; use fp8_recipe current, or "
                "compile false"
            )
        self._caches_weights = not (around.fsdp or around.compile or around.recompute)

    def _make_layer(self, linear: nn.Linear, name: str) -> nn.Module:
        layer: nn.Module = layer_class()(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device="meta",
        )
        layer.__dict__["owner"] = self
        return layer

    def autocast(self, first_micro_batch: bool | None = None) -> AbstractContextManager[object]:
        return self._autocast(first_micro_batch if self._caches_weights else None)

    @contextmanager
    def _autocast(self, first_micro_batch: bool | None) -> Iterator[None]:
        self.first_micro_batch, self.is_inside = first_micro_batch, True
        try:
            with torch.autocast(self.device.type, torch.bfloat16), self.enter_recipe():
                yield
        finally:
            self.first_micro_batch, self.is_inside = None, False

    def enter_recipe(self) -> AbstractContextManager[object]:
        """TransformerEngine's context for the recipe."""
        te = self._te
        return cast(
            AbstractContextManager[object],
            te.autocast(enabled=True, recipe=self._scaling, amax_reduction_group=self._group),
        )

    def reduce_over(self, group: ProcessGroup) -> None:
        self._group = group

    def _converted(self, linears: dict[str, nn.Linear]) -> None:
        self._layers.update(linears)
        if self._kept:
            self._place()

    def _restoring(self, linears: dict[str, nn.Linear]) -> None:
        self._collect()
        for name in linears:
            self._layers.pop(name, None)

    def state(self) -> dict[str, torch.Tensor]:
        self._collect()
        return dict(self._kept)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._kept = dict(state)
        if self.recipe.delayed and self._layers:
            self._place()

    def _collect(self) -> None:
        """Bring the delayed scales of the layers to the CPU."""
        if not self.recipe.delayed:
            return
        for name, layer in self._layers.items():
            if (found := layer.get_fp8_meta_tensors()) is None:
                continue
            for side, key in META.items():
                self._kept[f"{name}.scale_{side}"] = found[key][0].cpu()
                self._kept[f"{name}.amax_history_{side}"] = found[key][1].cpu()

    def _place(self) -> None:
        """Put the delayed scales that are kept into the layers, as their first pass would find them."""
        with torch.no_grad(), self.enter_recipe():
            for name, layer in self._layers.items():
                wanted = {}
                for side, key in META.items():
                    scale, history = torch.ones(SIZES[side]), torch.zeros(self._length, SIZES[side])
                    load_tensor(scale, self._kept, f"{name}.scale_{side}")
                    load_tensor(history, self._kept, f"{name}.amax_history_{side}")
                    wanted[key] = [scale, history]
                layer.init_fp8_metadata(num_gemms=1)
                layer.reset_fp8_meta_tensors(wanted)

    def _scale(self, name: str, role: str) -> torch.Tensor | None:
        if not self.recipe.delayed:
            return None
        side, place = SLOTS[cast(Role, role)]
        layer = self._layers[name]
        found = layer.get_fp8_meta_tensors()
        scale = torch.ones(SIZES[side], device=self.device) if found is None else found[META[side]][0]
        return scale[place].reshape(1, 1)


def load() -> tuple[ModuleType, ModuleType]:
    """TransformerEngine's PyTorch module and its module of recipes.

    Raises:
        ValueError: it does not load here, or the environment bends its recipes.
    """
    if bent := [name for name in CHANGING if os.environ.get(name, "0") != "0"]:
        raise ValueError(f"{bent[0]} is set and would change TransformerEngine's recipe unseen; unset it")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"this fp8_recipe needs TransformerEngine on a GPU, and it does not load here ({reason}); install it with "
            f"`{INSTALL}` on a machine with CUDA, or use fp8_recipe tensorwise, which torchao runs"
        ) from None
    return te, recipe


def make_recipe(recipe: ModuleType, name: RecipeName, amax_history: int) -> Any:
    """TransformerEngine's object for a recipe."""
    if name == "delayed":
        return recipe.DelayedScaling(
            margin=0, fp8_format=recipe.Format.HYBRID, amax_history_len=amax_history, amax_compute_algo="max"
        )
    if name == "block":
        return recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3)
    if name == "mxfp8":
        return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)
    return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)


@cache
def layer_class() -> type[nn.Module]:
    """Our te.Linear: called like nn.Linear, told of micro-batches by its owner, and without extra state.

    Activations are recomputed outside the loop's context, in backward: there the layer enters the recipe by itself.
    """
    te, _ = load()

    class TransformerEngineLinear(te.Linear):  # type: ignore[name-defined]
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            owner = self.owner
            with nullcontext() if owner.is_inside else owner.enter_recipe():
                output: torch.Tensor = super().forward(input, is_first_microbatch=owner.first_micro_batch)
            return output

    return TransformerEngineLinear
