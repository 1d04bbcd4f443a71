"""Consolidation as a step of its own: from shards at a prefix to an adapter artifact, on any CPU.

The last whole checkpoint is taken, a torn one is passed over with a warning, and whatever does not hold together is an
error. Left out on purpose: how (core/neuron).
"""

import logging

from crosstrain.components.consolidate.config import Config
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.neuron.adapter_folder import write_adapter
from crosstrain.components.core.neuron.checkpoint import find_checkpoint
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.telemetry import peak_rss_bytes

log = logging.getLogger(__name__)


def run(config: Config) -> Result:
    """Consolidate, check and commit.

    Raises:
        FileNotFoundError: no whole checkpoint lies at the source.
        ValueError: its parts do not hold together, or it is no trained LoRA adapter of the model.
    """
    base = Artifact.open(config.model, "model")
    checkpoint = find_checkpoint(open_store(config.source))
    ranks, stages = len(checkpoint.shards[0]), len(checkpoint.shards)
    log.info("%s: %d tensor-parallel ranks, %d pipeline stages", checkpoint.store.uri, ranks, stages)
    with ArtifactWriter(config.output) as writer:
        folder = writer.staging / "adapter"
        facts = write_adapter(checkpoint, base, folder, config.base_name)
        writer.add_folder(folder)
        artifact = writer.commit("consolidate", facts, config.options(), {"model": base})
    metrics: dict[str, float] = {
        "steps": facts.steps,
        "trainable_parameters": facts.trainable_parameters,
        "tensor_parallel": ranks,
        "pipeline_parallel": stages,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return Result(artifact, metrics)
