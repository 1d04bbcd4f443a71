"""One rank of a training by optimum-neuron 0.4.5: its model, its peft wrapper, its trainer, our data and our checks.

The only module that imports optimum-neuron, and only when a rank trains. It adds to the trainer what the trainer
lacks: the order of the data and the learning rates of every other backend, the guard, and checkpoints that go to the
store. Left out on purpose: validation while training (its do_eval raises) and resuming (it refuses). None of this has
been run on Trainium; docs/trainium.md says what has been checked, and how.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.guard import Diverged, Guard
from crosstrain.components.core.optimization import learning_rate
from crosstrain.components.core.telemetry import step_line
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.neuron.arguments import lora_arguments, model_arguments, trainer_arguments
from crosstrain.components.finetune_lora.neuron.preflight import Layout, compatible_settings
from crosstrain.components.finetune_lora.neuron.samples import Ordered, collate

log = logging.getLogger(__name__)

Row = dict[str, float]
"""One logged step, as training_log.jsonl has it."""


@dataclass(frozen=True)
class Work:
    """What a rank is to do."""

    config: Config
    base: Artifact
    layout: Layout
    targets: list[str]
    samples: Ordered
    length: int
    """Tokens a sequence."""
    trial: bool
    """Only find the graphs to compile: nothing is computed, so nothing is judged or saved."""


@dataclass
class Trained:
    """What a rank has seen."""

    history: list[Row] = field(default_factory=list)
    """Logged steps, as in training_log.jsonl."""
    trainable: int = 0
    """Parameters trained, on this rank."""


def train(work: Work, publish: Callable[[Path, int, list[Row]], None]) -> Trained:
    """Train on this rank, together with the others that torchrun started.

    Args:
        work: What to do.
        publish: Called on every rank, when all of them have saved, with the node's folder of a checkpoint, its
            step, and the steps logged so far.

    Raises:
        ValueError: the library did not do as it was told: sequence parallelism is on, or something else than factors
            is trained.
        Diverged: the loss went wrong; checkpoints saved before stand.
    """
    from optimum.neuron import NeuronSFTConfig
    from optimum.neuron.models.training import NeuronModelForCausalLM
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast

    config = work.config
    folder = _fresh_folder(config.output)
    arguments = NeuronSFTConfig(
        **trainer_arguments(config, work.layout, str(folder / "checkpoints"), work.length, work.trial)
    )
    if arguments.trn_config.sequence_parallel_enabled:
        raise ValueError("optimum-neuron has switched sequence parallelism on, with which its LoRA is wrong")
    source = _readable_model(work.base, folder / "model")
    model = NeuronModelForCausalLM.from_pretrained(str(source), arguments.trn_config, **model_arguments(config))
    torch.manual_seed(config.seed)
    trained = Trained()
    trainer = _trainer_class()(
        options=config,
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=work.samples,
        processing_class=PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json")),
        callbacks=[] if work.trial else [_reporter(work, trained, publish)],
        peft_config=LoraConfig(**lora_arguments(config, work.targets)),
    )
    trained.trainable = _only_factors(trainer.model)
    trainer.train()
    return trained


def _fresh_folder(output: str) -> Path:
    """An empty folder of this node's own: an earlier checkpoint in it would be loaded without a word."""
    folder = Path(tempfile.gettempdir()) / "crosstrain-neuron" / output.rstrip("/").rpartition("/")[2]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _readable_model(base: Artifact, folder: Path) -> Path:
    """The base as a local folder whose config.json transformers 4.57 reads right; each rank makes its own."""
    folder = folder / os.environ.get("LOCAL_RANK", "0")
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.manifest.files:
        local = folder / file.path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.unlink(missing_ok=True)
        if file.path == "config.json":
            settings = compatible_settings(json.loads(base.read(file.path)))
            local.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
        else:
            local.symlink_to(base.fetch(file.path).resolve())
    return folder


def _only_factors(model: Any) -> int:
    """How many parameters are trained: those of the factors, and no others."""
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    if not trained:
        raise ValueError("optimum-neuron trains no parameter at all; the adapter was not put on")
    if other := sorted(name for name in trained if ".lora_" not in name):
        raise ValueError(f"optimum-neuron trains {len(other)} parameters beside the factors ({other[0]}); LoRA is off")
    return sum(item.numel() for item in trained.values())


def _trainer_class() -> Any:
    """optimum-neuron's trainer with our order of samples and our learning rates."""
    from optimum.neuron import NeuronSFTTrainer
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import SequentialSampler

    class Trainer(NeuronSFTTrainer):
        def __init__(self, options: Config, **given: Any) -> None:
            self.options = options
            super().__init__(**given)

        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
            options = self.options
            self.lr_scheduler = LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: learning_rate(step, options) / options.learning_rate,
            )
            return self.lr_scheduler

    return Trainer


def _reporter(work: Work, trained: Trained, publish: Callable[[Path, int, list[Row]], None]) -> Any:
    """A callback that reports steps, judges them, and hands checkpoints on."""
    from transformers import TrainerCallback

    guard = Guard(work.config)
    first_on_node = os.environ.get("LOCAL_RANK", "0") == "0"

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if not logs or "loss" not in logs:
                return
            loss, norm = float(logs["loss"]), float(logs.get("grad_norm", 0.0))
            row = {"step": state.global_step, "loss": loss, "grad_norm": norm,
                   "tokens": work.samples.tokens(state.global_step),
                   "learning_rate": learning_rate(state.global_step - 1, work.config)}  # fmt: skip
            trained.history.append(row)
            if first_on_node:
                step_line(state.global_step, work.config.steps, loss=loss, grad_norm=norm)
            if reason := guard.judge(loss, norm):
                raise Diverged(f"step {state.global_step}: {reason}; the last checkpoint that was stored stands")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            publish(Path(args.output_dir) / f"checkpoint-{state.global_step}", state.global_step, trained.history)

    return Reporter()


def gather_over_ranks() -> Callable[[Any], list[Any]]:
    """A function that gives every rank's value to every rank, over the CPUs; all ranks make it together."""
    group = distributed.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, value, group=group)
        return found

    return gather
