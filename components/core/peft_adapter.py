"""A peft adapter folder, read without peft and without the base model: which tensor it changes, and how.

merge computes from it, finetune_lora checks by it what was trained. Everything that the formulas here do not
cover (other peft methods, initialisations that changed the base, trained biases…) is refused with the reason,
because a key that is silently left out makes another model. Left out on purpose: loading into a model, which
is peft's own work.

Source of the names: peft's `get_peft_model_state_dict`; of the arithmetic: `peft.tuners.lora`.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from crosstrain.components.core.storage import Store
from crosstrain.components.core.weights import Tensor, read_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values (or their beginnings) of `init_lora_weights` that subtract the initial adapter from the base weights."""

HANDLED = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_dora", "use_rslora", "velora_config",
)  # fmt: skip
"""Options of a peft configuration that the formulas cover, or that say nothing of what the weights mean."""


@dataclass(frozen=True)
class LoraModule:
    """One adapted module: `W + scale * B @ A`, and for DoRA its rows rescaled to `magnitude`."""

    name: str
    """Module in the base model: `model.layers.0.self_attn.q_proj`."""
    a: Tensor
    """[rank, in]; for an embedding [rank, rows of the embedding]."""
    b: Tensor
    """[out, rank]; for an embedding [embedding size, rank]."""
    scale: float
    magnitude: Tensor | None = None
    """[out], DoRA alone."""
    embedding: bool = False
    """Whether the delta is transposed, as an embedding's is."""

    @property
    def weight(self) -> str:
        """Name of the base tensor that it changes."""
        return self.name + ".weight"

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the base tensor that it fits."""
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.embedding else shape


@dataclass(frozen=True)
class Adapter:
    """What an adapter folder holds."""

    store: Store
    settings: dict[str, Any]
    """adapter_config.json."""
    modules: dict[str, LoraModule]
    """Base tensor name to the change made to it."""
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Base tensor name to the tensor that takes its place: modules_to_save, resized embeddings."""

    @property
    def dora(self) -> bool:
        return bool(self.settings.get("use_dora"))


def read_adapter(store: Store) -> Adapter:
    """Read an adapter folder's configuration and headers.

    Raises:
        FileNotFoundError: the folder lacks one of the two files.
        ValueError: the adapter is of a method or with options that are not handled, a key belongs to no
            module, or a module lacks one of its tensors.
    """
    where = store.locate(CONFIG_NAME)
    settings = json.loads(store.read(CONFIG_NAME))
    check_settings(settings, where)
    tensors, _ = read_header(store, WEIGHTS_NAME)
    replaced: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, part = _split(key, store.locate(WEIGHTS_NAME))
        if part:
            parts.setdefault(module, {})[part] = tensor
        else:
            replaced[module] = tensor
    modules = [_module(name, found, settings, where) for name, found in sorted(parts.items())]
    if not modules and not replaced:
        raise ValueError(f"{store.locate(WEIGHTS_NAME)}: holds no tensor; the adapter is empty")
    return Adapter(store, settings, {module.weight: module for module in modules}, replaced)


def check_settings(settings: dict[str, Any], where: str) -> None:
    """Refuse what cannot be merged onto the base it names."""
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{where}: a {settings.get('peft_type')} adapter; LORA (with or without DoRA) is handled")
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{where}: initialised by {start}, which changed the base weights, so that a merge onto the original one "
            "is wrong; convert it with peft's save_pretrained(path_initial_model_for_weight_conversion=…)"
        )
    if settings.get("bias", "none") != "none":
        raise ValueError(f"{where}: bias={settings['bias']!r} trained the base's biases, which is not handled")
    for name, value in settings.items():
        if value and name not in HANDLED:
            raise ValueError(f"{where}: {name} is set ({value!r:.60}), which is not handled; a merge would ignore it")


_PARTS = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector(?:\.weight)?)$"
)


def _split(key: str, where: str) -> tuple[str, str]:
    """A key's module and which of its tensors it is; a whole replaced tensor has the part ''."""
    if not key.startswith(PREFIX):
        raise ValueError(f"{where}: {key} does not begin with {PREFIX!r}; not saved by peft's save_pretrained")
    name = key.removeprefix(PREFIX)
    if match := _PARTS.match(name):
        return match["module"], match["part"].removesuffix(".weight")
    if "lora_" in name:
        raise ValueError(f"{where}: {key} is of no kind that is handled; the merge would leave it out")
    return name.replace(".base_layer.", ".").replace(".modules_to_save.", "."), ""


def _module(name: str, found: dict[str, Tensor], settings: dict[str, Any], where: str) -> LoraModule:
    embedding = "lora_embedding_A" in found
    wanted = {"lora_embedding_A", "lora_embedding_B"} if embedding else {"lora_A", "lora_B"}
    if settings.get("use_dora"):
        wanted.add("lora_magnitude_vector")
    if set(found) != wanted:
        wrong = min(wanted ^ set(found))
        raise ValueError(f"{where}: {name} {'lacks' if wrong in wanted else 'has an unexpected'} {wrong}")
    if embedding and settings.get("use_dora"):
        raise ValueError(f"{where}: DoRA on the embedding {name} is not handled; leave it out of target_modules")
    a, b = (found["lora_embedding_A"], found["lora_embedding_B"]) if embedding else (found["lora_A"], found["lora_B"])
    rank = pattern_value(settings.get("rank_pattern"), name, settings["r"])
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(f"{where}: rank {rank} is set for {name}, and its tensors are {a.shape} and {b.shape}")
    alpha = pattern_value(settings.get("alpha_pattern"), name, settings["lora_alpha"])
    scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    return LoraModule(name, a, b, scale, found.get("lora_magnitude_vector"), embedding)


def pattern_value(pattern: dict[str, float] | None, module: str, default: float) -> float:
    """A module's own rank or alpha: the first pattern that matches its name or the end of it, as peft does."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
