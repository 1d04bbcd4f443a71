"""What optimum-neuron 0.4.5 would ignore, break or only find out after an hour of compiling, refused beforehand.

Each refusal says why and what to do instead; what is known of the library's faults stands here and nowhere else.
Torch-free: it sees the options, the model's config.json and the number of processes. Left out on purpose: whether it
fits the cores' memory, which only a run shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain.components.finetune_lora.config import Config

MODEL_TYPES = ("llama", "qwen3", "granite")
PIPELINED = ("llama", "qwen3")
ATTENTION, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LINEARS = (*ATTENTION, "o_proj", *GATED, "down_proj")
"""Linear modules of the three architectures, without lm_head."""

TORCH = "choose backend torch (cpu, cuda, or device neuron with TorchNeuron)"

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "method": (
        ("lora",),
        "its DoRA takes norms of one rank's part of a weight and loses every magnitude when the checkpoint is put "
        f"together, so that plain LoRA would come out under DoRA's name; {TORCH}",
    ),
    "init_lora_weights": (
        ("default", "gaussian"),
        f"it would take the principal part of one rank's piece of a weight; {TORCH}",
    ),
    "modules_to_save": (((),), f"modules trained whole are not known to survive its sharding; {TORCH}"),
    "new_tokens": (((),), f"it cannot resize a sharded embedding; {TORCH}"),
    "packing": (
        (False,),
        "it has no mask between rows of one sequence; set neuron.packing=true to let each row see those before it, or "
        "leave both false",
    ),
    "activation_checkpointing": (("none",), "it has one of its own; set neuron.gradient_checkpointing=true instead"),
    "compile": ((False,), "Neuron's own compiler compiles every graph; leave compile false"),
    "on_divergence": (
        ("auto", "stop"),
        "its trainer cannot go back to a checkpoint; set on_divergence=stop",
    ),
}
"""Option to the values that the backend honours, and the reason with what to do instead for all others."""


@dataclass(frozen=True)
class Layout:
    """How the processes share the work."""

    tensor: int
    pipeline: int
    data: int
    accumulation: int
    """Forward passes a rank makes in an optimizer step."""
    micro_batch: int
    """Sequences a forward pass, on each data-parallel rank."""


def check_options(config: Config, data_kind: str) -> None:
    """Refuse options that the backend ignores or breaks.

    Args:
        config: The request.
        data_kind: Kind of the data artifact: shards or corpus.

    Raises:
        ValueError: with every reason at once.
    """
    faults = [
        f"{name}={getattr(config, name)!r}: {reason}"
        for name, (allowed, reason) in _REFUSED.items()
        if getattr(config, name) not in allowed
    ]
    if data_kind == "shards" and not config.neuron.packing:
        faults.append(
            "data: shards hold several documents a sequence, and the backend has no mask between them; set "
            f"neuron.packing=true to let each see those before it, or {TORCH}"
        )
    if faults:
        raise ValueError("backend optimum_neuron: " + "; ".join(faults))


def choose_targets(config: Config, fused_attention: bool) -> list[str]:
    """The linear modules to tune, by the ends of their names, in order.

    Args:
        config: The request.
        fused_attention: Whether query, key and value are one layer in the layout.

    Raises:
        ValueError: a name is no such module's, or some of the modules that share one A are missing.
    """
    if config.target_modules == ("all-linear",):
        return sorted(LINEARS)
    if unknown := sorted(set(config.target_modules) - set(LINEARS)):
        raise ValueError(
            f"target_modules: {unknown[0]!r} cannot be tuned by backend optimum_neuron; there are {', '.join(LINEARS)}"
        )
    for group, when in ((GATED, "always"), (ATTENTION, "in this layout")):
        chosen = set(group) & set(config.target_modules)
        if chosen and chosen != set(group) and (group is GATED or fused_attention):
            raise ValueError(
                f"target_modules: {', '.join(group)} are one layer {when} and share one A; name all of them or none "
                f"(missing: {', '.join(sorted(set(group) - chosen))})"
            )
    return sorted(set(config.target_modules))


def plan_layout(config: Config, processes: int) -> Layout:
    """Share the processes and the batch.

    Raises:
        ValueError: they do not divide; the message names the nearest that do.
    """
    tensor, pipeline = config.neuron.tensor_parallel, config.neuron.pipeline_parallel
    if processes % (tensor * pipeline):
        raise ValueError(
            f"{processes} processes do not divide into neuron.tensor_parallel {tensor} x neuron.pipeline_parallel "
            f"{pipeline}; change those, or run_on.processes_per_node and run_on.nodes"
        )
    data = processes // (tensor * pipeline)
    micro = config.micro_batch_size
    if config.global_batch_size % (data * micro):
        whole = config.global_batch_size // (data * micro)
        near = sorted({max(1, whole) * data * micro, (whole + 1) * data * micro})
        raise ValueError(
            f"global_batch_size {config.global_batch_size} does not divide into {data} data-parallel ranks with "
            f"micro_batch_size {micro}; nearest: {' or '.join(str(size) for size in near)}"
        )
    accumulation = config.global_batch_size // (data * micro)
    pieces, batch = config.neuron.pipeline_microbatches, accumulation * micro
    if pipeline > 1 and pieces and batch % pieces:
        raise ValueError(f"neuron.pipeline_microbatches {pieces} does not divide a rank's {batch} sequences a step")
    return Layout(tensor, pipeline, data, accumulation, micro)


def check_model(settings: Mapping[str, Any], layout: Layout, fuse_qkv: bool) -> bool:
    """Whether query, key and value are one layer in this layout.

    Args:
        settings: The model's config.json.
        layout: How it is to be spread.
        fuse_qkv: Whether that was asked for.

    Raises:
        ValueError: the architecture is not known to the backend, or does not divide over the ranks.
    """
    kind, ranks = settings.get("model_type"), layout.tensor
    if kind not in (PIPELINED if layout.pipeline > 1 else MODEL_TYPES):
        raise ValueError(
            f"backend optimum_neuron trains {', '.join(MODEL_TYPES)} ({', '.join(PIPELINED)} with pipeline_parallel), "
            f"and this model is {kind}; {TORCH}"
        )
    heads = int(settings["num_attention_heads"])
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    if ranks > kv_heads and ranks % kv_heads:
        raise ValueError(
            f"neuron.tensor_parallel {ranks} is no multiple of the model's {kv_heads} key-value heads, which are "
            f"copied for more ranks than heads; choose {kv_heads}, a divisor of it, or a multiple"
        )
    if ranks < kv_heads and kv_heads % ranks:
        raise ValueError(
            f"neuron.tensor_parallel {ranks} does not divide the model's {kv_heads} key-value heads; choose a divisor"
        )
    for name, size in (
        ("num_attention_heads", heads),
        ("intermediate_size", int(settings["intermediate_size"])),
        ("vocab_size", int(settings["vocab_size"])),
    ):
        if size % ranks:
            raise ValueError(f"neuron.tensor_parallel {ranks} does not divide the model's {name} {size}")
    if layout.pipeline > int(settings["num_hidden_layers"]):
        raise ValueError(
            f"neuron.pipeline_parallel {layout.pipeline} is more than its {settings['num_hidden_layers']} layers"
        )
    copied = bool(kv_heads % ranks)
    if fuse_qkv and not copied and heads != kv_heads:
        raise ValueError(
            f"neuron.fuse_qkv has no effect with {heads} query and {kv_heads} key-value heads on {ranks} ranks; "
            "leave it false"
        )
    return copied or fuse_qkv


def compatible_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers 4.57 reads as transformers 5 does.

    Version 5 writes the rotary embedding into `rope_parameters`, which 4.57 passes over in silence: base frequency
    and scaling would be the defaults, and every loss a little wrong.

    Raises:
        ValueError: layers have different rotary embeddings, which 4.57 cannot tell.
    """
    made = dict(settings)
    rope = made.pop("rope_parameters", None)
    if rope is not None:
        rope = dict(rope)
        if "rope_theta" not in rope:
            raise ValueError("config.json: rope_parameters differ between layers; transformers 4.57 cannot read that")
        made["rope_theta"] = rope.pop("rope_theta")
        made["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    if "dtype" in made:
        made["torch_dtype"] = made.pop("dtype")
    return made
