"""One arm of the training bench: a fresh process that trains one model over one stream of samples, and says how long.

    python -m bench.looping ARM --options '{"steps": 40, …}'

Arms: `bare` (the fewest lines of PyTorch that do the work), `ours` (core/training), `trainer` (transformers.Trainer).
All take the same samples in the same order (`BatchPlan`'s), start from the same weights, use the same optimizer with
the same rates, and read every step's loss and gradient norm. Time is taken where all meet, at the data set: a step
lasts from the first sample of its batch being asked for to the first of the next batch, so that whatever a loop does
in between is its own. Several arms can take turns, step by step. What is left
out: the last step, which no next one ends, and the first ones, which warm up.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.data import IGNORE, BatchPlan, Sample, collate
from crosstrain.components.core.model import build_model
from crosstrain.components.core.optimization import learning_rate, make_optimizer, undecayed
from crosstrain.components.core.precision import choose
from crosstrain.components.core.presets import PRESETS
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.core.training import train
from crosstrain.components.core.training_config import TrainingOptions

WARM_UP = 3
"""Steps left out of times."""
SAMPLES = 512
TURNS, READY = "BENCH_TURNS", "ready"
"""Variable that makes an arm wait for a line on standard input before each step, and what it says when it waits."""


@dataclass(frozen=True)
class Work:
    """What every arm does; equal work is equal fields."""

    steps: int = 40
    preset: str = "tiny"
    vocabulary: int = 4096
    length: int = 128
    global_batch: int = 8
    micro_batch: int = 8
    threads: int = 1
    precision: str = "fp32"
    recipe: str = "tensorwise"
    checkpoint_every: int = 1_000_000

    def options(self) -> TrainingOptions:
        """As the loop takes them: no validation, and but for `checkpoint_every` no checkpoint before the end."""
        return TrainingOptions(
            steps=self.steps,
            global_batch_size=self.global_batch,
            micro_batch_size=self.micro_batch,
            threads=self.threads,
            evaluate_every=0,
            checkpoint_every=self.checkpoint_every,
            on_divergence="stop",
        )

    def model(self) -> LlamaForCausalLM:
        """The model with its first weights."""
        shape = PRESETS[self.preset]
        return build_model(LlamaConfig(**shape, vocab_size=self.vocabulary), 0, torch.device("cpu"))

    def samples(self) -> list[Sample]:
        """Rows of two documents each: random walks over the ids, which a model can learn."""
        generator = np.random.default_rng(7)
        table = generator.integers(self.vocabulary, size=(self.vocabulary, 4))
        choices = generator.integers(4, size=(SAMPLES, self.length))
        ids = np.empty((SAMPLES, self.length), np.int64)
        ids[:, 0] = choices[:, 0]
        for index in range(1, self.length):
            ids[:, index] = table[ids[:, index - 1], choices[:, index]]
        cut = self.length // 2
        positions = np.concatenate([np.arange(cut), np.arange(self.length - cut)])
        return [Sample(row, np.where(positions == 0, IGNORE, row), positions) for row in ids]


class Clocked:
    """Samples that note when each step's first was asked for and given, by the clock and in CPU seconds."""

    def __init__(self, samples: list[Sample], size: int, order: list[int] | None = None) -> None:
        self._samples, self._size, self._count = samples, size, 0
        self._order = list(range(len(samples))) if order is None else order
        self.asked: list[tuple[float, float]] = []
        self.given: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        if self._count % self._size == 0:
            self.asked.append((time.perf_counter(), time.process_time()))
            wait_for_turn()
            self.given.append((time.perf_counter(), time.process_time()))
        self._count += 1
        return self._samples[self._order[index]]

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds and CPU seconds of each step but the last, waiting for a turn left out."""
        wall, cpu = (np.array(self.asked[1:]) - np.array(self.given[:-1])).T
        return wall.tolist(), cpu.tolist()


def wait_for_turn() -> None:
    """Say that a step could begin, and wait until it may; at once where nobody gives turns."""
    if os.environ.get(TURNS):
        print(READY, flush=True)
        sys.stdin.readline()


Said = dict[str, Any]


def order(work: Work) -> list[int]:
    """The samples that a run of `work` takes, one after another."""
    plan = BatchPlan(SAMPLES, work.global_batch, work.options().seed)
    return [int(index) for step in range(work.steps) for index in plan.indices(step)]


def bare(work: Work) -> tuple[Clocked, Said]:
    """PyTorch and nothing else."""
    options, model, data = work.options(), work.model().train(), Clocked(work.samples(), work.global_batch, order(work))
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, options, undecayed(model))
    losses: list[float] = []
    norms: list[float] = []
    for step in range(work.steps):
        first = step * work.global_batch
        micro = [
            tensors([data[index] for index in range(start, start + work.micro_batch)])
            for start in range(first, first + work.global_batch, work.micro_batch)
        ]
        labels = sum(int((targets != IGNORE).sum()) for _, _, targets in micro)
        total = torch.zeros(())
        for ids, positions, targets in micro:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            summed = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = summed / labels
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        norms.append(norm.item())
    return data, {"losses": losses, "norms": norms}


def tensors(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and next ids [B, L] of samples of one length."""
    columns = {name: torch.from_numpy(column) for name, column in collate(samples).items()}
    targets = functional.pad(columns["labels"][:, 1:], (0, 1), value=IGNORE)
    return columns["input_ids"], columns["position_ids"], targets


def ours(work: Work) -> tuple[Clocked, Said]:
    """`crosstrain.components.core.training.train`."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)  # each step's line is written, as in a run
    data = Clocked(work.samples(), work.global_batch)
    precision = choose(work.precision, torch.device("cpu"), recipe=work.recipe)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        state = Checkpoints(folder, "0" * 64, "train_fp8", {}, {}, keep=2)
        outcome = train(work.model(), data, work.options(), precision, state)
    rows = outcome.history
    return data, {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "stalls": list(outcome.stalls),
        "precision": precision.name,
    }


def trainer(work: Work) -> tuple[Clocked, Said]:
    """transformers.Trainer, told to do the same; its loss is the model's own."""
    options, model, data = work.options(), work.model(), Clocked(work.samples(), work.global_batch, order(work))
    optimizer = make_optimizer(dict(model.named_parameters()), options, undecayed(model))
    factor: Callable[[int], float] = lambda step: learning_rate(step, options) / options.learning_rate  # noqa: E731
    model.config.use_cache = False
    with tempfile.TemporaryDirectory() as folder:
        told = TrainingArguments(
            folder,
            max_steps=work.steps,
            per_device_train_batch_size=work.micro_batch,
            gradient_accumulation_steps=work.global_batch // work.micro_batch,
            max_grad_norm=options.clip_norm,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        loop = Trainer(
            model,
            told,
            data_collator=lambda samples: {name: torch.from_numpy(column) for name, column in collate(samples).items()},
            train_dataset=data,  # type: ignore[arg-type]
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
        )
        loop.train()
    rows = [row for row in loop.state.log_history if "loss" in row]
    return data, {"losses": [float(row["loss"]) for row in rows], "norms": [float(row["grad_norm"]) for row in rows]}


ARMS: dict[str, Callable[[Work], tuple[Clocked, Said]]] = {"bare": bare, "ours": ours, "trainer": trainer}


def run(arm: str, work: Work) -> Said:
    """Do an arm's work in this process; what it says of it."""
    torch.set_num_threads(work.threads)
    data, said = ARMS[arm](work)
    wall, cpu = data.steps()
    return {
        "arm": arm,
        "step_seconds": wall[WARM_UP:],
        "step_cpu_seconds": cpu[WARM_UP:],
        "peak_bytes": peak_rss_bytes(),
        "parameters": sum(item.numel() for item in work.model().parameters()),
        **said,
    }


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(prog="python -m bench.looping", description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("--options", default="{}", help="fields of Work, as JSON")
    given = parser.parse_args()
    print(json.dumps(run(given.arm, Work(**json.loads(given.options)))), flush=True)


if __name__ == "__main__":
    main()
