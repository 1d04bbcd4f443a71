"""The adapter: put onto a model before training, written as a standard peft folder after it, and checked.

The check reads back what was written: training tools are known to write plain LoRA under DoRA's name, to lose
modules, or to train nothing, and to succeed. PiSSA and OLoRA take the first factors' product out of the base, so what
is saved is the difference to them, `B A - B0 A0`, as factors of twice the rank that fit the original base; peft's own
conversion gives the same tensors and loses all others (magnitudes, modules_to_save). Left out on purpose: training.
"""

import difflib
import json
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from crosstrain.components.core.adapter_check import Expected, Factors
from crosstrain.components.core.adapter_check import check_adapter as check_adapter
from crosstrain.components.core.peft_adapter import CHANGES_BASE, CONFIG_NAME, PREFIX, WEIGHTS_NAME
from crosstrain.components.finetune_lora.config import Config

ALL_LINEAR = "all-linear"
EMBEDDING, HEAD = "embed_tokens", "lm_head"


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


def choose_saved(model: PreTrainedModel, config: Config, targets: list[str], tied: bool) -> list[str]:
    """Names of the modules trained whole: those asked for, and the embeddings where there are new tokens.

    Raises:
        ValueError: a name is no module's that has a weight of its own, or its factors are tuned already.
    """
    names = [name for name, module in model.named_modules() if "weight" in module._parameters]
    ends = sorted({name.rpartition(".")[2] for name in names})
    embeddings = (EMBEDDING,) if tied else (EMBEDDING, HEAD)
    wanted = sorted({*config.modules_to_save, *(embeddings if config.new_tokens else ())})
    chosen: list[str] = []  # whole names: peft would take any name that ends so, input_layernorm for norm
    for module in wanted:
        found = [name for name in names if name == module or name.endswith("." + module)]
        if not found:
            raise ValueError(
                f"modules_to_save: no module with a weight is called {module!r}; there are {', '.join(ends)}"
            )
        if tied and module == HEAD:
            raise ValueError(f"modules_to_save: {HEAD} is tied to {EMBEDDING} in this model; name {EMBEDDING}")
        both = [name for name in found if any(name == target or name.endswith("." + target) for target in targets)]
        if both:
            raise ValueError(f"modules_to_save: {both[0]} is in target_modules too; choose one of the two")
        chosen += found
    return sorted(set(chosen))


def add_adapter(model: PreTrainedModel, targets: list[str], saved: list[str], config: Config) -> PeftModel:
    """The model with a fresh adapter, whose parameters (FP32) alone are trained; random by the seed.

    Raises:
        ValueError: an initialisation from the base's principal part has a rank above what a weight has.
    """
    base_dtype = model.dtype
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        use_rslora=config.rslora,
        use_dora=config.method == "dora",
        init_lora_weights=cast(Any, True if config.init_lora_weights == "default" else config.init_lora_weights),
        modules_to_save=saved or None,
        ensure_weight_tying=bool(model.config.tie_word_embeddings) and any(name.endswith(EMBEDDING) for name in saved),
    )
    if changes_base(config.init_lora_weights):
        _check_rank(model, targets, config)
    torch.manual_seed(config.seed)
    tuned: PeftModel = get_peft_model(model, settings)
    for module in tuned.modules():
        if isinstance(module, ModulesToSaveWrapper):
            _in_fp32(module.modules_to_save["default"], base_dtype)
    return tuned


def changes_base(initialisation: str) -> bool:
    """Whether an initialisation takes the factors' product out of the base."""
    return initialisation.startswith(CHANGES_BASE)


def _check_rank(model: PreTrainedModel, targets: list[str], config: Config) -> None:
    for name, module in model.named_modules():
        is_target = any(name == end or name.endswith("." + end) for end in targets)
        if isinstance(module, nn.Linear) and is_target and config.rank > min(module.weight.shape):
            raise ValueError(
                f"rank {config.rank} is above {min(module.weight.shape)}, all that {name} has, and "
                f"{config.init_lora_weights} starts from its principal part; choose a lower rank"
            )


def _in_fp32(module: nn.Module, base_dtype: torch.dtype) -> None:
    """Train a module in FP32 amid a base of another type, which goes on to see its own type."""
    module.float()
    if base_dtype != torch.float32:
        module.register_forward_pre_hook(_inputs_to_fp32)
        module.register_forward_hook(lambda _, inputs, output: output.to(base_dtype))


def _inputs_to_fp32(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(item.float() if item.is_floating_point() else item for item in inputs)


def expected(model: PeftModel) -> Expected:
    """What an adapter saved from this model must hold."""
    shapes: dict[str, tuple[int, int]] = {}
    magnitudes: dict[str, torch.Tensor] = {}
    saved: dict[str, tuple[int, ...]] = {}
    initial: Factors = {}
    taken_out = changes_base(str(cast(LoraConfig, model.peft_config["default"]).init_lora_weights))
    for name, module in _base_model(model).named_modules():
        if isinstance(module, LoraLayer):
            weight = _weight(module.get_base_layer())
            shapes[name] = (weight.shape[0], weight.shape[1])
            if "default" in module.lora_magnitude_vector:
                magnitudes[name] = _copy(module.lora_magnitude_vector["default"])
            if taken_out:
                initial[name] = _copy(module.lora_A["default"]), _copy(module.lora_B["default"])
        elif isinstance(module, ModulesToSaveWrapper):
            for part, tensor in module.modules_to_save["default"].named_parameters():
                saved[f"{name}.{part}"] = tuple(tensor.shape)
    return Expected(shapes, magnitudes, saved, _aliases(model), initial)


def _copy(module: nn.Module) -> torch.Tensor:
    return _weight(module).detach().cpu().clone()


def _aliases(model: nn.Module) -> dict[str, str]:
    first = {id(item): name for name, item in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(item)] for name, item in every if item.requires_grad and first[id(item)] != name}


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight)


def _base_model(model: PeftModel) -> nn.Module:
    return cast(nn.Module, cast(Any, model).get_base_model())


def save_adapter(
    model: PeftModel, weights: dict[str, torch.Tensor], wanted: Expected, folder: Path, base_name: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with nothing in them that differs between runs.

    Args:
        model: Gives the adapter's settings; its own tensors may be sharded.
        weights: The trained parameters, by their names in the model.
        wanted: What was there before training.
        folder: Where.
        base_name: Of the base model.
    """
    tied = {alias: weights[name] for alias, name in wanted.aliases.items()}
    model.save_pretrained(str(folder), state_dict={**weights, **tied}, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    settings: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = base_name
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])  # peft holds sets
    if wanted.initial:
        _subtract(folder / WEIGHTS_NAME, wanted.initial)
        settings["init_lora_weights"] = True
        settings["r"] *= 2
        settings["lora_alpha"] *= 2**0.5 if settings["use_rslora"] else 2
    (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _subtract(file: Path, initial: Factors) -> None:
    """Make the factors in a file those of the difference to the initial ones: A over A0, B beside -B0."""
    tensors = load_file(file)
    for name, (a, b) in initial.items():
        key_a, key_b = (f"{PREFIX}{name}.lora_{part}.weight" for part in "AB")
        tensors[key_a] = torch.cat([tensors[key_a], a])
        tensors[key_b] = torch.cat([tensors[key_b], -b], dim=1)
    save_file(tensors, file, metadata={"format": "pt"})
