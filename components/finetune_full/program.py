"""Full fine-tuning: a model and shards in, a model out; the control that LoRA is compared with.

The loop is core/training; several processes are data-parallel (core/parallel), run all of this, and the first alone
writes. Left out on purpose: rows of prompt and completion, low precision, tensor and pipeline parallelism.
"""

import logging

import torch
from transformers import PreTrainedModel

from crosstrain.components import images
from crosstrain.components.core import model as models
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.checkpoint import Checkpoints, run_key
from crosstrain.components.core.data import BatchPlan, ShardDataset
from crosstrain.components.core.device import choose_device
from crosstrain.components.core.launch.run_job import run_as_job
from crosstrain.components.core.manifest import Source
from crosstrain.components.core.parallel.layout import Work, check_layout
from crosstrain.components.core.parallel.world import gathered, join, world_size
from crosstrain.components.core.precision import choose
from crosstrain.components.core.reproducible import reproducible
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokenizer import FILES
from crosstrain.components.core.training import Outcome, train
from crosstrain.components.finetune_full.config import Config

log = logging.getLogger(__name__)

COMPONENT = "finetune_full"


def run(config: Config) -> Result:
    """Tune every weight of a model and write it as a model artifact.

    Raises:
        ValueError, FileNotFoundError, PermissionError: an input, option or place does not do; before training.
        Diverged: the loss went wrong; the last good checkpoint stands.
        InterruptedError: SIGTERM; a checkpoint was saved.
        JobFailed: `run_on` wants a job, and it did not succeed.
    """
    if (launched := run_as_job(COMPONENT, config, images.GPU, config.steps)) is not None:
        return launched
    base, data = Artifact.open(config.model, "model"), Artifact.open(config.data, "shards")
    _check_fit(base, data)
    dataset, validation = ShardDataset(data, "train"), ShardDataset(data, "validation")
    layout = check_layout({}, world_size(), Work(config.global_batch_size, config.micro_batch_size), config)
    BatchPlan(len(dataset), config.global_batch_size, config.seed, world=layout.data)
    device = choose_device(config.device)
    open_store(config.output).check_writable()
    inputs = {"model": base.manifest.source(), "data": data.manifest.source()}
    with join(device) as world:
        checkpoints = Checkpoints(
            config.state or f"{config.output.rstrip('/')}.state",
            run_key(COMPONENT, {**config.options(), "device": device.type}, inputs),
            component=COMPONENT,
            options=config.options(),
            inputs=inputs,
            keep=config.keep_checkpoints,
            world=world,
        )
        with reproducible(config.threads):
            model = models.load_model(base, torch.float32, str(device) if world.size == 1 else "cpu")
        log.info("all of %d parameters are trained, on %s", base.facts.parameters, device)
        outcome = train(
            model, dataset, config, choose("fp32", device), checkpoints,
            validation=validation, world=world, layout=layout, device=device,
        )  # fmt: skip
        if world.first:
            _write(config, model, base, outcome, inputs)
        else:
            outcome.hand_over_weights()
        world.wait()
    artifact = Artifact.open(config.output, "model")
    metrics = {"trainable_parameters": base.facts.parameters, **outcome.metrics()}
    return Result(artifact, metrics if world.first else {})


def _check_fit(base: Artifact, data: Artifact) -> None:
    """Refuse shards of another tokenizer, or longer than the model takes."""
    model, shards = base.facts, data.facts
    if shards.tokenizer.sha256 != model.tokenizer_sha256 or shards.tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"{data.uri}: made with tokenizer {shards.tokenizer.sha256[:12]}… of {shards.tokenizer.vocab_size} ids, "
            f"which is not that of {base.uri}; tokenize the text again with tokenizer set to the model"
        )
    if shards.sequence_length > model.max_sequence_length:
        raise ValueError(
            f"{data.uri}: sequence length {shards.sequence_length} is above the model's maximum of "
            f"{model.max_sequence_length} positions; shard with a smaller sequence_length"
        )


def _write(config: Config, model: PreTrainedModel, base: Artifact, outcome: Outcome, inputs: dict[str, Source]) -> None:
    """The model artifact, from weights that are gathered one at a time, with the base's tokenizer."""
    with ArtifactWriter(config.output) as writer:
        weights, dtype = gathered(outcome.weights()), getattr(torch, config.save_dtype)
        models.add_weights(writer, base.facts.architecture, model.config, model.generation_config, weights, dtype)
        for name in FILES:
            if name in base.manifest.by_path:
                writer.add(base.fetch(name), name)
        with writer.create(models.LOG_NAME) as path:
            path.write_text(outcome.log_lines(), encoding="utf-8")
        facts = base.facts.model_copy(
            update={
                "dtype": config.save_dtype,
                "precision": "fp32",
                "steps": outcome.steps,
                "tokens_seen": outcome.tokens,
                "train_loss": outcome.train_loss,
                "guard_events": outcome.guard_events,
            }
        )
        writer.commit(COMPONENT, facts, config.options(), inputs)
