"""Pre-training: shards in, a Hugging Face model out.

Everything that can be refused is refused before the first step. The loop is core/training, the number formats are
core/precision, several processes core/parallel; what is here is the model that is built, and what is told about it.
Every process runs all of this, and the first alone writes.
"""

import logging
import math

import torch
from transformers import GenerationConfig, LlamaConfig

from crosstrain.components import images
from crosstrain.components.core import model as models
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.checkpoint import Checkpoints, run_key
from crosstrain.components.core.data import BatchPlan, ShardDataset
from crosstrain.components.core.device import choose_device
from crosstrain.components.core.launch.run_job import run_as_job
from crosstrain.components.core.parallel.layout import Layout, Work, check_layout
from crosstrain.components.core.parallel.world import gathered, join, world_size
from crosstrain.components.core.precision import Precision, Surroundings, choose
from crosstrain.components.core.presets import read_shape
from crosstrain.components.core.reproducible import reproducible
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.training import Outcome, train
from crosstrain.components.core.unigram import count_labels, unigram_loss
from crosstrain.components.train_fp8.config import Config

log = logging.getLogger(__name__)

COMPONENT = "train_fp8"
_UNIGRAM_TOKENS = 10_000_000
"""Training tokens counted at most for the unigram model."""


def run(config: Config) -> Result:
    """Train a model from a shards artifact and write it as a model artifact.

    Raises:
        ValueError, FileNotFoundError, PermissionError: an input, option or place does not do; before training.
        Diverged: the loss went wrong and could not be recovered; the last good checkpoint stands.
        InterruptedError: SIGTERM; a checkpoint was saved.
        JobFailed: `run_on` wants a job, and it did not succeed.
    """
    if (launched := run_as_job(COMPONENT, config, images.GPU, config.steps)) is not None:
        return launched
    shards = Artifact.open(config.shards, "shards")
    facts = shards.facts
    dataset, validation = (ShardDataset(shards, name, config.cache_bytes) for name in ("train", "validation"))
    device = choose_device(config.device)
    precision = choose(
        config.precision,
        device,
        recipe=config.fp8_recipe,
        keep_first=config.fp8_keep_first,
        keep_last=config.fp8_keep_last,
        minimum_features=config.fp8_minimum_features,
        amax_history=config.fp8_amax_history,
    )
    shape = read_shape(config.preset, config.model_config_json)
    llama = models.llama_config(shape, facts.tokenizer)
    models.check_length(facts.sequence_length, llama)
    layout = check_layout(llama.to_dict(), world_size(), _work(config, precision), config, config)
    precision.check(llama, _surroundings(config, layout))
    BatchPlan(len(dataset), config.global_batch_size, config.seed, world=layout.data)
    open_store(config.output).check_writable()
    inputs = {"shards": shards.manifest.source()}
    identity = {**config.options(), "shape": shape, "device": device.type}
    with join(device) as world:
        checkpoints = Checkpoints(
            config.state or f"{config.output.rstrip('/')}.state",
            run_key(COMPONENT, identity, inputs),
            component=COMPONENT,
            options=config.options(),
            inputs=inputs,
            keep=config.keep_checkpoints,
            world=world,
        )
        with reproducible(config.threads):
            model = models.build_model(llama, config.seed, device if world.size == 1 else torch.device("cpu"))
        parameters = models.count_parameters(model)
        log.info("Llama with %d parameters, %s on %s, %d x %s", parameters, precision.name, layout, world.size, device)
        outcome = train(
            model, dataset, config, precision, checkpoints,
            validation=validation, world=world, layout=layout, device=device,
        )  # fmt: skip
        if world.first:
            _write(config, shards, llama, precision, outcome, parameters)
        else:
            outcome.hand_over_weights()
        world.wait()
    artifact = Artifact.open(config.output, "model")
    if not world.first:
        return Result(artifact)
    return Result(artifact, {**_metrics(outcome, precision, parameters), **_unigram(dataset, validation, config)})


def _surroundings(config: Config, layout: Layout) -> Surroundings:
    return Surroundings(
        tensor_parallel=layout.tensor,
        fsdp=layout.data > 1,
        recompute=config.activation_checkpointing != "none",
        compile=config.compile,
    )


def _work(config: Config, precision: Precision) -> Work:
    return Work(
        config.global_batch_size,
        config.micro_batch_size,
        schedule=config.pipeline_schedule,
        alignment=precision.token_multiple,
        minimum_features=config.fp8_minimum_features,
    )


def _write(
    config: Config, shards: Artifact, llama: LlamaConfig, precision: Precision, outcome: Outcome, parameters: int
) -> None:
    """The model artifact, from weights that are gathered one at a time."""
    with ArtifactWriter(config.output) as writer:
        generation = GenerationConfig.from_model_config(llama)
        dtype = getattr(torch, config.save_dtype)
        models.add_weights(writer, "LlamaForCausalLM", llama, generation, gathered(outcome.weights()), dtype)
        models.add_tokenizer(writer, shards)
        with writer.create(models.LOG_NAME) as path:
            path.write_text(outcome.log_lines(), encoding="utf-8")
        facts = models.llama_facts(
            llama,
            parameters=parameters,
            dtype=config.save_dtype,
            tokenizer_sha256=shards.facts.tokenizer.sha256,
            precision=precision.name,
            steps=outcome.steps,
            tokens_seen=outcome.tokens,
            train_loss=outcome.train_loss,
            guard_events=outcome.guard_events,
        )
        writer.commit(COMPONENT, facts, config.options(), {"shards": shards})


def _unigram(train: ShardDataset, validation: ShardDataset, config: Config) -> dict[str, float]:
    """The loss that counting tokens reaches on the very samples that the validation loss is taken over."""
    vocab_size = train.vocab_size
    samples = range(config.validation_samples(len(validation)))
    wanted = count_labels((validation[index] for index in samples), vocab_size)
    entropy = unigram_loss(train, wanted, _UNIGRAM_TOKENS)
    return {} if entropy is None else {"unigram_entropy": entropy}


def _metrics(outcome: Outcome, precision: Precision, parameters: int) -> dict[str, float]:
    metrics = {
        "parameters": parameters,
        "guard_events": len(outcome.guard_events),
        **outcome.metrics(precision.speed_name),
    }
    if outcome.validation_loss is not None:
        metrics["perplexity"] = math.exp(min(outcome.validation_loss, 700.0))
    return metrics
