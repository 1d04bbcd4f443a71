"""A transformers model whose weights stay on disk: a forward pass in FP32 that reads each weight when it is used.

The proof needs the logits of models that do not fit into memory. Linear layers are computed from a few rows of
their weight at a time, embeddings read the rows of the ids at hand, vectors (norms, biases) are loaded. The model's
own code runs all the rest, and peft's own code runs the adapter. Left out on purpose: training, caching and speed;
one pass reads the model once.
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from crosstrain.components.core.peft_adapter import PREFIX
from crosstrain.components.core.storage import Store
from crosstrain.components.core.weights import Tensor, read_rows, read_tensor, row_blocks

_FP32_BYTES = 4


@dataclass(frozen=True)
class _Slot:
    """A parameter of the model and the tensor on disk that it stands for."""

    module: nn.Module
    name: str
    tensor: Tensor
    hollow: nn.Parameter
    """What stands there while the values are on disk."""


def streamed_model(
    settings: Mapping[str, Any],
    store: Store,
    tensors: Mapping[str, Tensor],
    adapters: Sequence[tuple[Path, float]] = (),
    noise: Mapping[str, float] | None = None,
) -> nn.Module:
    """Build a model for evaluation whose weights are read from `store` during its forward pass.

    Args:
        settings: config.json.
        store: Where the safetensors files lie.
        tensors: The model's tensors by name.
        adapters: Local folders of peft adapters to apply, unmerged, and their weights.
        noise: Tensor name to the largest relative error to put on each of its values, uniform and fixed;
            matrices alone.

    Raises:
        ValueError: a parameter of the architecture has no tensor, or the model has a layer that is not handled.
    """
    model = _empty_model(settings)
    slots = _slots(model, tensors)
    for slot in slots:
        slot.module._parameters[slot.name] = slot.hollow
    if adapters:
        model = _with_adapters(model, adapters)
        _disturb_replaced(model, {id(slot.hollow) for slot in slots}, noise or {})
    whole = _dora_layers(model)
    unused = {id(wrapper.original_module) for wrapper in model.modules() if isinstance(wrapper, ModulesToSaveWrapper)}
    for slot in slots:
        if id(slot.module) in unused:
            continue  # the adapter brought a whole module in its place
        read = partial(_read_noisy, store, slot.tensor, (noise or {}).get(slot.tensor.name, 0.0))
        _attach(slot, store, read, whole.get(id(slot.module)))
    return model.eval()


def _with_adapters(model: nn.Module, adapters: Sequence[tuple[Path, float]]) -> nn.Module:
    """The model with all adapters at work, by peft's own forward pass."""
    names = [f"adapter_{number}" for number in range(len(adapters))]
    tuned = PeftModel.from_pretrained(model, str(adapters[0][0]), names[0], low_cpu_mem_usage=True)
    for name, (folder, _) in zip(names[1:], adapters[1:], strict=True):
        tuned.load_adapter(str(folder), name, low_cpu_mem_usage=True)
    for layer in tuned.modules():
        if isinstance(layer, LoraLayer):
            for name, (_, weight) in zip(names, adapters, strict=True):
                if name in layer.scaling:
                    layer.scaling[name] *= weight
    if len(names) > 1:
        cast(Any, tuned.base_model).set_adapter(names)
    return tuned.float()


def check_rope(settings: Mapping[str, Any]) -> None:
    """Refuse a position encoding that this transformers would not read, and compute another model.

    Raises:
        ValueError: config.json tells it in `rope_parameters` alone, and transformers is older than 5.
    """
    found = version("transformers")
    if "rope_parameters" in settings and "rope_theta" not in settings and int(found.split(".")[0]) < 5:
        raise ValueError(
            f"config.json tells the position encoding in rope_parameters ({settings['rope_parameters']}), which "
            f"transformers {found} does not read; install transformers 5"
        )


def _empty_model(settings: Mapping[str, Any]) -> nn.Module:
    check_rope(settings)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.tie_weights()
    model.config.name_or_path = ""
    return model


def _slots(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[_Slot]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    slots = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found = [alias for alias in names[id(parameter)] if alias in tensors]
            if not found:
                raise ValueError(f"the weights lack {names[id(parameter)][0]}, which the architecture has")
            # One element seen as the whole shape: a real CPU tensor, as peft wants it, that takes no memory.
            hollow = nn.Parameter(torch.zeros(1).expand(parameter.shape), requires_grad=False)
            slots.append(_Slot(module, name, tensors[found[0]], hollow))
    return slots


def _disturb_replaced(model: nn.Module, hollow: set[int], noise: Mapping[str, float]) -> None:
    """Put the noise on base weights that the adapter brought itself: modules_to_save, resized embeddings."""
    for name, parameter in model.named_parameters():
        own = re.sub(r"\.(modules_to_save\.adapter_\d+|base_layer)\.", ".", name.removeprefix(PREFIX))
        if id(parameter) not in hollow and own in noise:
            _disturb(parameter.data, noise[own], seed=0)


def _dora_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Base layer (by id) to the DoRA layer around it, which needs the whole weight to take its norm."""
    layers = (m for m in model.modules() if isinstance(m, LoraLayer) and len(m.lora_magnitude_vector))
    return {id(layer.get_base_layer()): layer for layer in layers}


def _attach(slot: _Slot, store: Store, read: Callable[[int, int], torch.Tensor], dora_layer: nn.Module | None) -> None:
    """Let a parameter's values be read when they are needed; `read(start, stop)` gives rows of a matrix in FP32."""
    module, tensor = slot.module, slot.tensor
    if module._parameters[slot.name] is not slot.hollow:
        return  # the adapter brought its own
    if tuple(slot.hollow.shape) != tensor.shape:
        raise ValueError(f"{tensor.name} is {tensor.shape}, and the architecture wants {tuple(slot.hollow.shape)}")
    if len(tensor.shape) < 2:
        module._parameters[slot.name] = nn.Parameter(read_tensor(store, tensor).float(), requires_grad=False)
    elif dora_layer is not None:
        dora_layer.register_forward_pre_hook(partial(_load_whole, slot, read))
        dora_layer.register_forward_hook(partial(_unload, slot))
    elif isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(partial(_load_ids, slot, read))
        module.register_forward_hook(partial(_unload, slot))
    elif type(module) is nn.Linear:
        module.forward = partial(_linear, slot, read)  # type: ignore[method-assign]
    else:
        raise ValueError(f"{tensor.name} belongs to a {type(module).__name__}, which the proof does not handle")


def _read_noisy(store: Store, tensor: Tensor, noise: float, start: int, stop: int) -> torch.Tensor:
    return _disturb(read_rows(store, tensor, start, stop).float(), noise, seed=start)


def _disturb(values: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """Multiply each value in place by a random number in 1 - noise … 1 + noise."""
    if noise:
        generator = torch.Generator().manual_seed(seed)
        values.mul_(torch.rand(values.shape, generator=generator).mul_(2 * noise).add_(1 - noise))
    return values


def _linear(slot: _Slot, read: Callable[[int, int], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`x @ W.T + b` from a few rows of W at a time: [..., in] -> [..., out]."""
    blocks = row_blocks(slot.tensor, slot.tensor.shape[1] * _FP32_BYTES)
    y = torch.cat([functional.linear(x, read(start, stop)) for start, stop in blocks], dim=-1)
    bias = slot.module._parameters.get("bias")
    return y if bias is None else y + bias


def _load_ids(
    slot: _Slot, read: Callable[[int, int], torch.Tensor], module: nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor]:
    """Put the rows of the ids at hand into the embedding, and the ids' places among them into its input."""
    ids, places = torch.unique(args[0], return_inverse=True)
    rows = torch.cat([read(i, i + 1) for i in ids.tolist()])
    module._parameters[slot.name] = nn.Parameter(rows, requires_grad=False)
    return (places,)


def _load_whole(slot: _Slot, read: Callable[[int, int], torch.Tensor], module: nn.Module, args: Any) -> None:
    slot.module._parameters[slot.name] = nn.Parameter(read(0, slot.tensor.rows), requires_grad=False)


def _unload(slot: _Slot, module: nn.Module, args: Any, output: Any) -> None:
    slot.module._parameters[slot.name] = slot.hollow
