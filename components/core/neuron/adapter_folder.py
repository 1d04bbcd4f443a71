"""A consolidated adapter as a standard peft folder, checked against the base it is for."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from crosstrain.components.core.adapter_check import check_adapter, wanted_of
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import AdapterFacts
from crosstrain.components.core.neuron.checkpoint import CONFIG, ShardedCheckpoint
from crosstrain.components.core.neuron.consolidation import consolidate
from crosstrain.components.core.peft_adapter import CONFIG_NAME, WEIGHTS_NAME
from crosstrain.components.core.weights import model_tensors

TRAINER_STATE = "trainer_state.json"


def write_adapter(checkpoint: ShardedCheckpoint, base: Artifact, folder: Path, base_name: str) -> AdapterFacts:
    """Put a sharded checkpoint together in a folder, and check that it is a trained adapter of the base.

    Args:
        checkpoint: What the ranks wrote.
        base: The model that was tuned.
        folder: Where adapter_config.json and adapter_model.safetensors go.
        base_name: Of the base, for adapter_config.json; empty: made from its manifest.

    Raises:
        ValueError: the checkpoint does not hold together, says DoRA, or is not what its configuration says it is.
    """
    settings: dict[str, Any] = json.loads(checkpoint.store.read(CONFIG))
    if settings.get("use_dora"):
        raise ValueError(
            f"{checkpoint.store.locate(CONFIG)}: says use_dora, and optimum-neuron 0.4.5 saves no magnitudes that "
            "could be put together: it is plain LoRA under DoRA's name; train DoRA with backend torch"
        )
    settings["base_model_name_or_path"] = base_name or f"crosstrain-model-{base.manifest.sha256[:12]}"
    settings["inference_mode"] = True
    settings["target_modules"] = sorted(settings["target_modules"])
    folder.mkdir(parents=True, exist_ok=True)
    weights = consolidate(checkpoint)
    save_file(dict(sorted(weights.items())), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    check_adapter(folder, wanted_of(model_tensors(base.files), settings["target_modules"]), "lora")
    return AdapterFacts(
        method="lora",
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        target_modules=tuple(settings["target_modules"]),
        trainable_parameters=sum(tensor.numel() for tensor in weights.values()),
        base_parameters=base.facts.parameters,
        base_sha256=base.manifest.sha256,
        steps=max(checkpoint.step, 0),
        tokens_seen=0,
        train_loss=_last_loss(checkpoint),
    )


def _last_loss(checkpoint: ShardedCheckpoint) -> float | None:
    """The last loss that the trainer logged, where its state lies with the checkpoint."""
    if not checkpoint.store.exists(TRAINER_STATE):
        return None
    history = json.loads(checkpoint.store.read(TRAINER_STATE)).get("log_history", [])
    losses = [float(row["loss"]) for row in history if "loss" in row]
    return losses[-1] if losses else None
