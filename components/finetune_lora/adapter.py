"""The adapter: put onto a model before training, written as a standard peft folder after it, and checked.

The check reads back what was written: training tools are known to write plain LoRA under DoRA's name, to lose
modules, or to train nothing, and to succeed. Left out on purpose: training, and options that change the base
weights (PiSSA, OLoRA) or its size (new tokens).
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from crosstrain.components.core.peft_adapter import CONFIG_NAME, LoraModule, read_adapter
from crosstrain.components.core.storage import LocalStore, Store
from crosstrain.components.core.weights import read_tensor
from crosstrain.components.finetune_lora.config import Config

ALL_LINEAR = "all-linear"
HEAD = "lm_head"


@dataclass(frozen=True)
class Expected:
    """What the written adapter must hold, taken from the model before training."""

    shapes: dict[str, tuple[int, int]]
    """Adapted module to the shape of its base weight."""
    magnitudes: dict[str, torch.Tensor]
    """Adapted module to its magnitudes before training; DoRA alone."""


def choose_targets(model: PreTrainedModel, targets: tuple[str, ...], tied: bool) -> list[str]:
    """The linear modules to tune, by the ends of their names.

    Args:
        model: The base.
        targets: As the user gave them, or `all-linear` alone.
        tied: Whether lm_head is the embedding.

    Raises:
        ValueError: a name is no linear module's; the message has those that there are, the nearest first.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ends = sorted({name.rpartition(".")[2] for name in names})
    if targets == (ALL_LINEAR,):
        return [end for end in ends if end != HEAD]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            near = difflib.get_close_matches(target, ends, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"target_modules: no linear module is called {target!r}. {hint}There are {', '.join(ends)}, "
                f"or {ALL_LINEAR} alone"
            )
        if tied and target == HEAD:
            raise ValueError(f"target_modules: {HEAD} is tied to the embedding in this model; leave it out")
    return sorted(set(targets))


def add_adapter(model: PreTrainedModel, targets: list[str], config: Config) -> PeftModel:
    """The model with a fresh adapter, whose parameters (FP32) alone are trained; random by the seed."""
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        use_rslora=config.rslora,
        use_dora=config.method == "dora",
    )
    torch.manual_seed(config.seed)
    tuned: PeftModel = get_peft_model(model, settings)
    return tuned


def expected(model: PeftModel) -> Expected:
    """What an adapter saved from this model must hold."""
    shapes: dict[str, tuple[int, int]] = {}
    magnitudes: dict[str, torch.Tensor] = {}
    for name, module in _base_model(model).named_modules():
        if isinstance(module, LoraLayer):
            weight = _weight(module.get_base_layer())
            shapes[name] = (weight.shape[0], weight.shape[1])
            if "default" in module.lora_magnitude_vector:
                magnitudes[name] = _weight(module.lora_magnitude_vector["default"]).detach().cpu().clone()
    return Expected(shapes, magnitudes)


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight)


def _base_model(model: PeftModel) -> nn.Module:
    return cast(nn.Module, cast(Any, model).get_base_model())


def save_adapter(model: PeftModel, weights: dict[str, torch.Tensor], folder: Path, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with nothing in them that differs between runs.

    Args:
        model: Gives the adapter's settings; its own tensors may be sharded.
        weights: The adapter's parameters, by their names in the model.
        folder: Where.
        base_name: Of the base model.
    """
    model.save_pretrained(str(folder), state_dict=weights)
    (folder / "README.md").unlink(missing_ok=True)
    settings: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = base_name
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])  # peft holds sets
    (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_adapter(folder: Path, wanted: Expected, method: str) -> None:
    """Read an adapter back and check that it is what was asked for.

    Raises:
        ValueError: modules are missing, of a wrong shape or in excess, a factor is not finite or B is all zero, or
            for DoRA magnitudes are missing or have not moved.
    """
    adapter = read_adapter(LocalStore(folder))
    found = {module.name: module for module in adapter.modules.values()}
    if adapter.dora != (method == "dora"):
        raise ValueError(f"the adapter says use_dora={adapter.dora}, and {method} was asked for")
    if different := wanted.shapes.keys() ^ found.keys():
        name = min(different)
        where = "is missing from" if name in wanted.shapes else "is in excess in"
        raise ValueError(f"{name} {where} the adapter ({len(found)} modules, {len(wanted.shapes)} wanted)")
    for name, module in found.items():
        if module.shape != wanted.shapes[name]:
            raise ValueError(f"{name}: the adapter fits {module.shape}, and the base's weight is {wanted.shapes[name]}")
        _check_factors(adapter.store, module)
        if method == "dora":
            assert module.magnitude is not None  # read_adapter has seen to it
            if torch.equal(read_tensor(adapter.store, module.magnitude).flatten(), wanted.magnitudes[name].flatten()):
                raise ValueError(f"{name}: DoRA's magnitudes have not moved; was the learning rate ever above zero?")


def _check_factors(store: Store, module: LoraModule) -> None:
    a, b = read_tensor(store, module.a), read_tensor(store, module.b)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"{module.name}: the adapter holds values that are not finite")
    if not b.any():
        raise ValueError(f"{module.name}: B is all zero, so nothing was learned; no gradient reached the module")
