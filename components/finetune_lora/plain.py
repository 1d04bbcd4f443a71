"""Fine-tuning with LoRA or DoRA: a model and data in, a standard peft adapter out.

Everything that can be refused is refused before the first step; what was trained is read back and checked after the
last. The loop is core/training, the data are core/data's shards or this component's rows (see material), the adapter is
peft's; what is here is how they meet. Several processes are data-parallel: each holds a part of base and adapter
(core/parallel), runs all of this, and the first alone writes. Left out on purpose: tensor and pipeline parallelism.
"""

import logging

import torch
from peft import PeftModel

from crosstrain.components import images
from crosstrain.components.core import model as models
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.data import BatchPlan
from crosstrain.components.core.device import choose_device
from crosstrain.components.core.launch.run_job import run_as_job
from crosstrain.components.core.manifest import AdapterFacts, Source
from crosstrain.components.core.parallel.layout import Work, check_layout
from crosstrain.components.core.parallel.world import gathered, join, world_size
from crosstrain.components.core.precision import choose
from crosstrain.components.core.reproducible import reproducible
from crosstrain.components.core.run_key import run_key
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.training import Outcome, train
from crosstrain.components.finetune_lora.adapter import (
    Expected,
    add_adapter,
    changes_base,
    check_adapter,
    choose_saved,
    choose_targets,
    expected,
    save_adapter,
)
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.material import Material, read_material
from crosstrain.components.finetune_lora.vocabulary import make_room

log = logging.getLogger(__name__)

COMPONENT = "finetune_lora"


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
    material = read_material(base, data, config)
    layout = check_layout({}, world_size(), Work(config.global_batch_size, config.micro_batch_size), config)
    BatchPlan(len(material.train), config.global_batch_size, config.seed, world=layout.data)
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
            tied = base.facts.tied_embeddings
            targets = choose_targets(model, config.target_modules, tied)
            saved = choose_saved(model, config, targets, tied)
            base_parameters = models.count_parameters(model)
            if material.vocab_size:
                make_room(model, material.known, material.vocab_size)
            tuned = add_adapter(model, targets, saved, config)
            wanted = expected(tuned)
        trainable = sum(parameter.numel() for parameter in tuned.parameters() if parameter.requires_grad)
        log.info(
            "%s: %d of %d parameters are trained, on %s", config.method, trainable, base_parameters + trainable, device
        )
        outcome = train(
            tuned, material.train, config, choose("fp32", device), checkpoints,
            validation=material.validation, world=world, layout=layout, device=device,
        )  # fmt: skip
        widened = 2 if changes_base(config.init_lora_weights) else 1
        facts = AdapterFacts(
            method=config.method,
            rank=config.rank * widened,
            alpha=config.alpha * (widened**0.5 if config.rslora else widened),
            target_modules=tuple(sorted({name.rpartition(".")[2] for name in wanted.shapes})),
            trainable_parameters=trainable,
            base_parameters=base_parameters,
            base_sha256=base.manifest.sha256,
            steps=outcome.steps,
            tokens_seen=outcome.tokens,
            train_loss=outcome.train_loss,
            rows=material.rows,
            rows_dropped=material.dropped,
        )
        if world.first:
            _write(config, tuned, wanted, material, outcome, facts, inputs)
        else:
            outcome.hand_over_weights()
        world.wait()
    artifact = Artifact.open(config.output, "adapter")
    return Result(artifact, _metrics(outcome, facts) if world.first else {})


def _write(
    config: Config,
    tuned: PeftModel,
    wanted: Expected,
    material: Material,
    outcome: Outcome,
    facts: AdapterFacts,
    inputs: dict[str, Source],
) -> None:
    """The adapter artifact, checked before it exists."""
    with ArtifactWriter(config.output) as writer:
        folder = writer.staging / "adapter"
        name = config.base_name or f"crosstrain-model-{facts.base_sha256[:12]}"
        save_adapter(tuned, dict(gathered(outcome.weights())), wanted, folder, name)
        check_adapter(folder, wanted, config.method)
        for file, content in material.tokenizer.items():
            (folder / file).write_bytes(content)
        writer.add_folder(folder)
        with writer.create(models.LOG_NAME) as path:
            path.write_text(outcome.log_lines(), encoding="utf-8")
        writer.commit(COMPONENT, facts, config.options(), inputs)


def _metrics(outcome: Outcome, facts: AdapterFacts) -> dict[str, float]:
    return {
        "trainable_parameters": facts.trainable_parameters,
        "trainable_fraction": facts.trainable_parameters / (facts.base_parameters + facts.trainable_parameters),
        "rows": facts.rows,
        "rows_dropped": facts.rows_dropped,
        **outcome.metrics(),
    }
