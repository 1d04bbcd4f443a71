"""Fine-tuning with LoRA or DoRA: a model and data in, a standard peft adapter out.

Everything that can be refused is refused before the first step; what was trained is read back and checked after the
last. The loop is core/training, the data are core/data's shards or this component's rows, the adapter is peft's; what
is here is how they meet. Several processes are data-parallel: each holds a part of base and adapter (core/parallel),
runs all of this, and the first alone writes. Left out on purpose: tensor and pipeline parallelism.
"""

import logging

import torch
from peft import PeftModel

from crosstrain.components import images
from crosstrain.components.core import model as models
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.checkpoint import Checkpoints, run_key
from crosstrain.components.core.data import BatchPlan, ShardDataset
from crosstrain.components.core.device import choose_device
from crosstrain.components.core.launch.run_job import run_as_job
from crosstrain.components.core.manifest import AdapterFacts, ModelFacts, Source
from crosstrain.components.core.parallel.layout import Work, check_layout
from crosstrain.components.core.parallel.world import gathered, join, world_size
from crosstrain.components.core.precision import choose
from crosstrain.components.core.reproducible import reproducible
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.core.tokenizer import FILES, load_tokenizer
from crosstrain.components.core.training import Outcome, train
from crosstrain.components.finetune_lora.adapter import (
    Expected,
    add_adapter,
    check_adapter,
    choose_targets,
    expected,
    save_adapter,
)
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.rows import RowDataset, read_rows

log = logging.getLogger(__name__)

COMPONENT = "finetune_lora"
ROW_LENGTH = 1024
"""Longest row in tokens when the user sets none."""


def run(config: Config) -> Result:
    """Tune a model and write the adapter.

    Raises:
        ValueError, FileNotFoundError, PermissionError: an input, option or place does not do, before training; or
            the trained adapter is not what was asked for.
        Diverged: the loss went wrong; the last good checkpoint stands.
        InterruptedError: SIGTERM; a checkpoint was saved.
        JobFailed: `run_on` wants a job, and it did not succeed.
    """
    if (launched := run_as_job(COMPONENT, config, images.GPU, config.steps)) is not None:
        return launched
    base, data = Artifact.open(config.model, "model"), Artifact.open(config.data)
    dataset, validation = _data(base, data, config)
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
            place = str(device) if world.size == 1 else "cpu"
            model = models.load_model(base, getattr(torch, config.base_dtype), place)
            targets = choose_targets(model, config.target_modules, base.facts.tied_embeddings)
            base_parameters = models.count_parameters(model)
            tuned = add_adapter(model, targets, config)
            wanted = expected(tuned)
        trainable = sum(parameter.numel() for parameter in tuned.parameters() if parameter.requires_grad)
        log.info(
            "%s: %d of %d parameters are trained, on %s", config.method, trainable, base_parameters + trainable, device
        )
        outcome = train(
            tuned, dataset, config, choose("fp32", device), checkpoints,
            validation=validation, world=world, layout=layout, device=device,
        )  # fmt: skip
        facts = AdapterFacts(
            method=config.method,
            rank=config.rank,
            alpha=config.alpha,
            target_modules=tuple(sorted({name.rpartition(".")[2] for name in wanted.shapes})),
            trainable_parameters=trainable,
            base_parameters=base_parameters,
            base_sha256=base.manifest.sha256,
            steps=outcome.steps,
            tokens_seen=outcome.tokens,
            train_loss=outcome.train_loss,
            rows=len(dataset) if isinstance(dataset, RowDataset) else 0,
            rows_dropped=dataset.dropped if isinstance(dataset, RowDataset) else 0,
        )
        if world.first:
            _write(config, tuned, wanted, outcome, facts, inputs)
        else:
            for _ in outcome.weights():
                continue  # rank 0 gathers them
        world.wait()
    artifact = Artifact.open(config.output, "adapter")
    return Result(artifact, _metrics(outcome, facts) if world.first else {})


def _write(
    config: Config,
    tuned: PeftModel,
    wanted: Expected,
    outcome: Outcome,
    facts: AdapterFacts,
    inputs: dict[str, Source],
) -> None:
    """The adapter artifact, checked before it exists."""
    with ArtifactWriter(config.output) as writer:
        folder = writer.staging / "adapter"
        name = config.base_name or f"crosstrain-model-{facts.base_sha256[:12]}"
        save_adapter(tuned, dict(gathered(outcome.weights())), folder, name)
        check_adapter(folder, wanted, config.method)
        writer.add_folder(folder)
        with writer.create(models.LOG_NAME) as path:
            path.write_text(outcome.log_lines(), encoding="utf-8")
        writer.commit(COMPONENT, facts, config.options(), inputs)


def _data(base: Artifact, data: Artifact, config: Config) -> tuple[ShardDataset | RowDataset, ShardDataset | None]:
    """What to train on and, where the data have such a split, what to measure on; checked against the model."""
    facts: ModelFacts = base.facts
    if data.manifest.kind == "shards":
        _check_shards(base, data)
        return ShardDataset(data, "train"), ShardDataset(data, "validation")
    if data.manifest.kind != "corpus":
        raise ValueError(f"{data.uri}: this is a {data.manifest.kind} artifact; give shards or a corpus of JSONL rows")
    if facts.tokenizer_sha256 is None:
        raise ValueError(
            f"{base.uri}: the model has no tokenizer.json, and rows of text need one; import it with the model"
        )
    if config.sequence_length > facts.max_sequence_length:
        raise ValueError(
            f"sequence_length {config.sequence_length} is above the model's maximum of {facts.max_sequence_length} "
            "positions; choose a smaller one"
        )
    for file in base.manifest.files:
        if file.path in FILES:
            base.fetch(file.path)
    tokenizer = load_tokenizer(base.fetch("tokenizer.json").parent)
    _check_vocabulary(tokenizer.vocab_size, facts, base.uri)
    length = config.sequence_length or min(ROW_LENGTH, facts.max_sequence_length)
    return read_rows(data, tokenizer, config, length), None


def _check_shards(base: Artifact, data: Artifact) -> None:
    model, shards = base.facts, data.facts
    if shards.tokenizer.sha256 != model.tokenizer_sha256:
        has = f"{model.tokenizer_sha256[:12]}…" if model.tokenizer_sha256 else "no tokenizer.json"
        raise ValueError(
            f"{data.uri}: made with the tokenizer {shards.tokenizer.sha256[:12]}…, and the model has {has}; tokenize "
            "the text again with tokenizer set to the model"
        )
    _check_vocabulary(shards.tokenizer.vocab_size, model, base.uri)
    if shards.sequence_length > model.max_sequence_length:
        raise ValueError(
            f"{data.uri}: sequence length {shards.sequence_length} is above the model's maximum of "
            f"{model.max_sequence_length} positions; shard with a smaller sequence_length"
        )


def _check_vocabulary(size: int, facts: ModelFacts, where: str) -> None:
    if size > facts.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has {size} ids and the model's embedding {facts.vocab_size}; resize the model's "
            "embeddings to its tokenizer first"
        )


def _metrics(outcome: Outcome, facts: AdapterFacts) -> dict[str, float]:
    metrics: dict[str, float] = {
        "trainable_parameters": facts.trainable_parameters,
        "trainable_fraction": facts.trainable_parameters / (facts.base_parameters + facts.trainable_parameters),
        "tokens_seen": outcome.tokens,
        "rows": facts.rows,
        "rows_dropped": facts.rows_dropped,
        "training_seconds": outcome.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if outcome.train_loss is not None:
        metrics["train_loss"] = outcome.train_loss
    if outcome.validation_loss is not None:
        metrics["validation_loss"] = outcome.validation_loss
    if outcome.tokens_per_second:
        metrics["tokens_per_second"] = outcome.tokens_per_second
    return metrics
