"""A sharded adapter of optimum-neuron put together as peft's own: whole tensors, Hugging Face's module names.

Upstream's function does this too, and is what the tests compare with, bit for bit. It is not called here because it
imports neuronx-distributed, which no package index has, and because it looks at less: it leaves out a rank whose file
is missing, takes rank 0's copy of what every rank holds without comparing the others, fails on adapters that leave a
fused layer out, and writes no configuration. Here all of that is an error or works, on any CPU.

How the tensors are cut: a column-parallel layer has A whole on every rank and rows of B on each; a row-parallel one
columns of A, and B whole. gate and up are one layer with one A; query, key and value likewise where there are fewer
key-value heads than ranks, and then keys and values are copied `kv_size_multiplier` times and the query heads are
sorted so that each rank has those of its keys. Left out on purpose: shards saved through torch_xla (use_xser), and
full models.

Source: optimum-neuron's `transformations_utils.py` (0.4.5); neuronx-distributed's `qkv_linear.py`.
"""

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crosstrain.components.core.neuron.checkpoint import ShardedCheckpoint

Shards = list[dict[str, torch.Tensor]]
"""State of each tensor-parallel rank."""

_ADAPTER_NAME = re.compile(r"\.(lora_(?:embedding_)?[AB])\.default\b")


@dataclass(frozen=True)
class Fused:
    """Several linear layers that are one in the checkpoint."""

    kind: str
    """FusedLinearsSpec or GQAQKVColumnParallelLinearSpec."""
    spec: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The layers that it stands for."""
        if self.kind == "FusedLinearsSpec":
            return list(self.spec["linear_names"])
        return [self.spec[f"{part}_projection_name"] for part in ("query", "key", "value")]


@dataclass(frozen=True)
class Stage:
    """The metadata of one pipeline stage, by what is looked up in it."""

    parameters: Mapping[str, Mapping[str, Any]]
    """Name without the adapter's, to how the parameter is cut."""
    fused: Mapping[str, Fused]
    """Fused layer's module to what it stands for."""
    outputs: Mapping[str, Fused]
    """Output projection whose inputs are in the order of sorted query heads, to the sorting."""


def consolidate(checkpoint: ShardedCheckpoint) -> dict[str, torch.Tensor]:
    """The whole adapter, by the names of peft's files.

    Raises:
        ValueError: a file does not load, ranks disagree on what they hold or on tensors that all of them hold, a
            trained parameter is missing, a shape does not fit, or it is a DoRA adapter.
    """
    whole: dict[str, torch.Tensor] = {}
    for metadata, keys in zip(checkpoint.metadata, checkpoint.shards, strict=True):
        stage = _stage(metadata)
        shards = [_load(checkpoint, key) for key in keys]
        for key, shard in zip(keys, shards, strict=True):
            if different := shards[0].keys() ^ shard.keys():
                raise ValueError(
                    f"{checkpoint.store.locate(key)}: holds other parameters than rank 0's file ({min(different)})"
                )
        missing = [name for name in stage.parameters if "lora_" in name and name not in shards[0]]
        if missing:
            raise ValueError(f"{checkpoint.store.uri}: the shards lack {missing[0]} ({len(missing)} in all)")
        for name in sorted(shards[0]):
            try:
                parts = dict(_whole(name, [shard[name] for shard in shards], stage))
            except (RuntimeError, KeyError, IndexError) as error:
                raise ValueError(
                    f"{checkpoint.store.uri}: {name} does not fit its metadata ({error}); was the checkpoint "
                    "written by optimum-neuron 0.4.5?"
                ) from None
            if twice := parts.keys() & whole.keys():
                raise ValueError(f"{checkpoint.store.uri}: {min(twice)} is there twice")
            whole |= {key: part.contiguous().clone() for key, part in parts.items()}
    if not whole:
        raise ValueError(f"{checkpoint.store.uri}: the shards hold no tensor; nothing was trained")
    return whole


def _load(checkpoint: ShardedCheckpoint, key: str) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(io.BytesIO(checkpoint.store.read(key)), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ValueError(
            f"{checkpoint.store.locate(key)}: not a readable shard ({' '.join(str(error).split())[:200]})"
        ) from None
    if wrong := [name for name, tensor in loaded.items() if not isinstance(tensor, torch.Tensor)]:
        raise ValueError(f"{checkpoint.store.locate(key)}: {wrong[0]} is no tensor; save with use_xser=False")
    state: dict[str, torch.Tensor] = loaded
    return state


def _stage(metadata: Mapping[str, Any]) -> Stage:
    fused: dict[str, Fused] = {}
    outputs: dict[str, Fused] = {}
    for entry in metadata["model_weight_transformation_specs"]:
        module = entry["module_fully_qualified_name"]
        for kind, spec in entry["specs"]:
            one = Fused(kind, spec)
            if kind == "FusedLinearsSpec":
                fused[f"{module}.{spec['fused_linear_name']}"] = one
            elif kind == "GQAQKVColumnParallelLinearSpec":
                fused[f"{module}.{spec['gqa_qkv_projection_name']}"] = one
                outputs[f"{module}.{spec['output_projection_name']}"] = one
            else:
                raise ValueError(f"{module}: the transformation {kind} is not handled")
    parameters = {_ADAPTER_NAME.sub(r".\1", name): one for name, one in metadata["parameters"].items()}
    return Stage(parameters, fused, outputs)


def _whole(name: str, pieces: Sequence[torch.Tensor], stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that one parameter of the checkpoint becomes."""
    if "lora_magnitude_vector" in name:
        raise ValueError(
            f"{name}: sharded DoRA magnitudes are norms of one rank's part, and cannot be put together; train DoRA "
            "with backend torch"
        )
    module, _, part = name.partition(".lora_")
    cut = stage.parameters[name]
    if module in stage.fused:
        yield from _unfuse(name, module, part, pieces, stage.fused[module])
        return
    if not cut["tensor_model_parallel"]:
        yield name, same(name, pieces)
        return
    tensor = torch.cat(list(pieces), dim=cut["partition_dim"])
    if module in stage.outputs and part.startswith("A."):
        tensor = _in_model_order(tensor.T, stage.outputs[module].spec).T
    yield name, tensor


def _unfuse(
    name: str, module: str, part: str, pieces: Sequence[torch.Tensor], fused: Fused
) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = module.rpartition(".")[0]
    if part.startswith("A."):
        shared = same(name, pieces)
        for linear in fused.names:
            yield f"{prefix}.{linear}.lora_{part}", shared
    elif fused.kind == "FusedLinearsSpec":
        if fused.spec["fuse_axis"] != 0:
            raise ValueError(f"{name}: layers fused along their inputs are not handled")
        sizes = [size // fused.spec["tp_size"] for size in fused.spec["original_dims"]]
        split = [piece.split(sizes) for piece in pieces]
        for index, linear in enumerate(fused.names):
            yield f"{prefix}.{linear}.lora_{part}", torch.cat([one[index] for one in split])
    else:
        yield from _unfuse_qkv(name, prefix, part, pieces, fused)


def _unfuse_qkv(
    name: str, prefix: str, part: str, pieces: Sequence[torch.Tensor], fused: Fused
) -> Iterator[tuple[str, torch.Tensor]]:
    spec = fused.spec
    rows = [spec["q_output_size_per_partition"], *[spec["kv_output_size_per_partition"]] * 2]
    stem, _, letters = part.rpartition("_")
    split = [piece.split(rows) for piece in pieces] if letters == "qkv" else [(piece,) for piece in pieces]
    for index, letter in enumerate(letters):
        tensor = torch.cat([one[index] for one in split])
        if letter == "q":
            tensor = _in_model_order(tensor, spec)
        else:
            tensor = same(f"{name} ({letter})", tensor.chunk(spec["kv_size_multiplier"]))
        yield f"{prefix}.{fused.names['qkv'.index(letter)]}.lora_{stem}", tensor


def _in_model_order(tensor: torch.Tensor, spec: Mapping[str, Any]) -> torch.Tensor:
    """Query heads (along the first axis) in the model's order, out of the ranks' order."""
    order = torch.tensor(heads_by_rank(spec["num_attention_heads"], spec["num_key_value_heads"], spec["tp_size"],
                                       spec["kv_size_multiplier"]))  # fmt: skip
    heads = tensor.reshape(len(order), -1, *tensor.shape[1:])
    sorted_heads = torch.empty_like(heads)
    sorted_heads[order] = heads
    return sorted_heads.reshape(tensor.shape)


def heads_by_rank(heads: int, key_value_heads: int, ranks: int, copies: int) -> list[int]:
    """Query heads in the order in which the ranks hold them, all ranks after one another.

    The keys lie as `copies` repetitions of all of them, cut evenly over the ranks; the c-th copy of a key goes
    with the c-th part of the query heads that belong to it.
    """
    group = heads // key_value_heads
    share = group // copies
    return [
        key * group + copy * share + head
        for copy in range(copies)
        for key in range(key_value_heads)
        for head in range(share)
    ]


def same(name: str, copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first of several copies of one tensor, which must agree to one unit in the last place (in the norm).

    Not bit for bit: Trainium rounds stochastically, on each core by itself. Copies whose gradients were never
    added up differ by as much as was learned.

    Raises:
        ValueError: they differ by more.
    """
    first = copies[0].double()
    allowed = torch.finfo(copies[0].dtype).eps * first.norm()
    for rank, copy in enumerate(copies[1:], 1):
        distance = (copy.double() - first).norm()
        if not distance <= allowed:
            raise ValueError(
                f"{name}: copies 0 and {rank} of what every rank must hold alike differ by {distance:.3g} (norm "
                f"{first.norm():.3g}): their gradients were not added up, as happens with sequence parallelism in "
                "optimum-neuron 0.4.5; train again with disable_sequence_parallel=True"
            )
    return copies[0]
