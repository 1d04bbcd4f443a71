"""Which of optimum-neuron's sharded adapter checkpoints is the one to use: the last that is whole.

A training run leaves `checkpoint-<step>/adapter_default/` with adapter_config.json and, under adapter_shards/, one
file a rank, one JSON of metadata a pipeline stage, and two marks: `checkpoint` is written first, `done` last. What a
killed save left lacks something of it and is passed over with a warning; nothing is guessed from a number alone.
Files are looked at by name here, none is opened but the metadata. Left out on purpose: what the tensors mean
(consolidation).

Source of the layout: neuronx-distributed's `trainer/checkpoint.py`, optimum-neuron's `peft_model.py` (0.4.5).
"""

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from crosstrain.components.core.storage import Store

log = logging.getLogger(__name__)

ADAPTER = "adapter_default"
"""Folder of the one adapter that a run trains."""
CONFIG = f"{ADAPTER}/adapter_config.json"
SHARDS = f"{ADAPTER}/adapter_shards"
BEGUN, DONE = f"{SHARDS}/checkpoint", f"{SHARDS}/done"

_FOLDER = re.compile(r"checkpoint-(\d+)")
_SHARD = re.compile(rf"{SHARDS}/model/dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_METADATA = re.compile(rf"{SHARDS}/mp_metadata_pp_rank_(\d+)\.json")


@dataclass(frozen=True)
class ShardedCheckpoint:
    """One whole checkpoint."""

    store: Store
    """The folder that holds `adapter_default/`."""
    step: int
    """Optimizer steps done; -1 where the folder's name does not say."""
    metadata: tuple[dict[str, Any], ...]
    """How the parameters are cut, one a pipeline stage."""
    shards: tuple[tuple[str, ...], ...]
    """Key of the file of each pipeline stage and, within it, each tensor-parallel rank."""


def find_checkpoint(store: Store) -> ShardedCheckpoint:
    """The last whole checkpoint at a prefix, which holds `checkpoint-<step>` folders or is one itself.

    Raises:
        FileNotFoundError: there is none; the message says what each one found lacks.
    """
    keys: dict[str, set[str]] = {}
    for entry in store.list():
        folder, _, rest = entry.key.partition("/")
        if _FOLDER.fullmatch(folder):
            keys.setdefault(folder, set()).add(rest)
        elif folder == ADAPTER:
            keys.setdefault("", set()).add(entry.key)
    faults = []
    for folder in sorted(keys, key=_step, reverse=True):
        place = store.child(folder) if folder else store
        fault = _fault(keys[folder])
        if not fault:
            metadata = _read_metadata(place, keys[folder])
            fault = _missing_ranks(metadata, keys[folder])
        if not fault:
            return _checkpoint(place, _step(folder), metadata, keys[folder])
        faults.append(f"{folder or 'the folder'} {fault}")
        log.warning("%s: %s; passed over", place.uri, fault)
    raise FileNotFoundError(
        f"{store.uri}: no whole checkpoint of optimum-neuron here "
        f"({'; '.join(faults) or f'no checkpoint-<step> folder and no {ADAPTER}'}); give the output_dir of the "
        "training, or one of its checkpoint-<step> folders"
    )


def _step(folder: str) -> int:
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else -1


def _fault(keys: set[str]) -> str:
    """What a checkpoint lacks, by the names of its files; empty: nothing."""
    if CONFIG not in keys:
        return f"lacks {CONFIG}"
    if BEGUN in keys and DONE not in keys:
        return f"lacks {DONE}: the save was cut short"
    if any(key.endswith(".pt.tensors") or ".pt.tensors/" in key for key in keys):
        return "was saved with use_xser=True, which only torch_xla reads; save with use_xser=False"
    if not any(_METADATA.fullmatch(key) for key in keys):
        return f"lacks {SHARDS}/mp_metadata_pp_rank_0.json"
    return ""


def _read_metadata(store: Store, keys: set[str]) -> list[dict[str, Any]]:
    stages = sorted(int(match[1]) for key in keys if (match := _METADATA.fullmatch(key)))
    return [json.loads(store.read(f"{SHARDS}/mp_metadata_pp_rank_{stage}.json")) for stage in stages]


def _missing_ranks(metadata: list[dict[str, Any]], keys: set[str]) -> str:
    """What is missing of tensor-parallel ranks x pipeline stages."""
    found = {(int(match[1]), int(match[2])) for key in keys if (match := _SHARD.fullmatch(key))}
    ranks = max([_ranks(one) for one in metadata] + [tensor + 1 for tensor, _ in found])
    stages = max([len(metadata)] + [stage + 1 for _, stage in found])
    if len(metadata) < stages:
        return f"has the metadata of {len(metadata)} of {stages} pipeline stages"
    wanted = {(tensor, stage) for tensor in range(ranks) for stage in range(stages)}
    if missing := sorted(wanted - found):
        return f"lacks {len(missing)} of {len(wanted)} shards (first: {_name(*missing[0])})"
    return ""


def _ranks(metadata: dict[str, Any]) -> int:
    """Tensor-parallel ranks, as the metadata of a stage tells them."""
    cut = [one.get("num_partitions", 1) for one in metadata["parameters"].values()]
    fused = [spec.get("tp_size", 1) for specs in metadata["model_weight_transformation_specs"]
             for _, spec in specs["specs"]]  # fmt: skip
    return max([1, *cut, *fused])


def _name(tensor: int, stage: int) -> str:
    return f"{SHARDS}/model/dp_rank_00_tp_rank_{tensor:02d}_pp_rank_{stage:02d}.pt"


def _checkpoint(store: Store, step: int, metadata: list[dict[str, Any]], keys: set[str]) -> ShardedCheckpoint:
    ranks = sum(1 for key in keys if _SHARD.fullmatch(key)) // len(metadata)
    shards = tuple(tuple(_name(tensor, stage) for tensor in range(ranks)) for stage in range(len(metadata)))
    return ShardedCheckpoint(store, step, tuple(metadata), shards)
