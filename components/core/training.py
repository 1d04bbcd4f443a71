"""The training loop: one function, `train`, for every component that trains.

    outcome = train(model, dataset, options, precision, checkpoints, validation=held_out)

`model` is a Hugging Face causal LM, or one that peft wrapped; every parameter that requires a gradient is
trained, and only those are checkpointed. `dataset` has `len()` and gives a `Sample` for an index (ShardDataset,
or any other; samples may differ in length). The loss is the sum of the tokens' cross-entropies over the number
of labels in the whole global batch, so that it does not depend on how the batch is cut into micro-batches. The
order of samples is `BatchPlan`'s, a function of the step alone; with the checkpoint's weights, optimizer and
random state that makes a resumed run bit-equal to one never stopped, on a CPU with as many threads.

A step that goes wrong (see core/guard) is not applied. Under `fallback` the run goes back to its last
checkpoint, which is never taken while the guard is suspicious, and replays in the higher precision; what was
decided is in the outcome. Left out on purpose: several processes, and what becomes of the weights.
"""

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from crosstrain.components.core import telemetry
from crosstrain.components.core.batch import Batch, accept_pads, loss_sum, make_batch
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.data import BatchPlan
from crosstrain.components.core.guard import Diverged, Event, Guard
from crosstrain.components.core.optimization import learning_rate, make_optimizer
from crosstrain.components.core.precision import Precision
from crosstrain.components.core.reproducible import random_state, reproducible, seed_everything, set_random_state
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Dataset, Outcome, Progress

log = logging.getLogger(__name__)


def train(
    model: nn.Module,
    dataset: Dataset,
    options: TrainingOptions,
    precision: Precision,
    checkpoints: Checkpoints,
    *,
    validation: Dataset | None = None,
) -> Outcome:
    """Train a model in place, resuming from the run's last checkpoint when there is one.

    Args:
        model: On the device to train on, in fp32, not converted; comes back plain, and in eval mode.
        dataset: At least one sample.
        options: How.
        precision: What arithmetic; see core/precision.
        checkpoints: Where state is kept, for this very run.
        validation: Held-out samples; None or empty: no validation loss.

    Raises:
        ValueError: too few samples, or a checkpoint that does not load.
        Diverged: the guard stopped the run; the last good checkpoint stands.
        InterruptedError: SIGTERM came; a checkpoint was saved.
    """
    with reproducible(options.threads), _sigterm() as stop:
        return _Run(model, dataset, options, precision, checkpoints, validation, stop).train()


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        options: TrainingOptions,
        precision: Precision,
        checkpoints: Checkpoints,
        validation: Dataset | None,
        stop: threading.Event,
    ) -> None:
        self.model, self.dataset, self.options, self.validation = model, dataset, options, validation
        self.precision, self.checkpoints, self.stop = precision, checkpoints, stop
        self.plan = BatchPlan(len(dataset), options.global_batch_size, options.seed)
        self.parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self.optimizer = make_optimizer(model, options)
        self.guard = Guard(options)
        self.progress = Progress()
        self.active: Precision | None = None
        self.loss = torch.compile(loss_sum, dynamic=False) if options.compile else loss_sum
        self.higher = precision.fallback() if _falls_back(options, precision) else None
        self.seconds: list[float] = []
        self.step_tokens: list[int] = []

    def train(self) -> Outcome:
        if self.precision.token_multiple > 1:
            accept_pads(self.model)
        resumed_from = self._start()
        try:
            while self.progress.step < self.options.steps:
                self._switch(self._precision_of_step())
                if reason := self._step():
                    self._roll_back(reason)
                else:
                    self._after_step()
        finally:
            if self.active is not None:
                self.active.restore(self.model)
            self.model.eval()
        timed = sum(self.seconds[1:])
        return Outcome(
            history=self.progress.history,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            unlabelled_steps=self.progress.unlabelled_steps,
            guard_events=tuple(self.progress.events),
            seconds=sum(self.seconds),
            tokens_per_second=sum(self.step_tokens[1:]) / timed if timed else 0.0,
            resumed_from=resumed_from,
        )

    def _start(self) -> int:
        """Take up the last checkpoint, or seed everything; the step to begin at."""
        self.checkpoints.clear_torn()
        if saved := self.checkpoints.steps():
            self._load(saved[-1])
            log.info("resuming at step %d from %s", saved[-1], self.checkpoints.uri)
            return saved[-1]
        seed_everything(self.options.seed)
        if self.higher is not None:
            self._save()
        return 0

    def _precision_of_step(self) -> Precision:
        """The precision of the step to come: the run's, or the higher one while a divergence is replayed."""
        in_replay = self.higher is not None and self.progress.step < self.progress.high_until
        return self.higher if in_replay and self.higher is not None else self.precision

    def _switch(self, precision: Precision) -> None:
        if self.active is precision:
            return
        if self.active is not None:
            self.active.restore(self.model)
        changed = precision.convert(self.model)
        self.active = precision
        log.info("precision %s from step %d: %d linear layers", precision.name, self.progress.step + 1, changed)

    def _step(self) -> str:
        """Do one optimizer step; or leave the weights as they are and say why the step is a divergence."""
        assert self.active is not None
        started = time.perf_counter()
        batches = list(self._batches(self.dataset, self.plan.indices(self.progress.step).tolist()))
        labels = sum(batch.labels for batch in batches)
        tokens = sum(batch.tokens for batch in batches)
        if not labels:
            log.warning("step %d: no token of the global batch has a label; skipped", self.progress.step + 1)
            self.progress.step += 1
            self.progress.unlabelled_steps += 1
            return ""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with self.active.autocast():
                loss = self.loss(self.model, *batch.tensors(self.device)) / labels
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.options.clip_norm)
        loss_value, norm_value = torch.stack([total, norm]).tolist()
        rate = learning_rate(self.progress.step, self.options)
        if not (reason := self.guard.judge(loss_value, norm_value)):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.progress.step += 1
            self.progress.tokens += tokens
            self.progress.history.append(
                {
                    "step": self.progress.step,
                    "loss": loss_value,
                    "grad_norm": norm_value,
                    "learning_rate": rate,
                    "tokens": self.progress.tokens,
                }
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - started)
        self.step_tokens.append(tokens)
        return reason

    def _batches(self, dataset: Dataset, indices: list[int]) -> Iterator[Batch]:
        size = self.options.micro_batch_size
        for start in range(0, len(indices), size):
            yield make_batch([dataset[index] for index in indices[start : start + size]], self.precision.token_multiple)

    def _after_step(self) -> None:
        """Validation, progress line, end of a replay, checkpoint, SIGTERM: in this order."""
        step, options = self.progress.step, self.options
        is_last = step == options.steps
        if is_last or (options.evaluate_every and step % options.evaluate_every == 0):
            self._validate()
        if is_last or step % options.log_every == 0:
            self._report()
        if step == self.progress.high_until:
            self._end_replay()
        stopping = self.stop.is_set()
        if is_last or stopping or step % options.checkpoint_every == 0:
            self._save()
        if stopping:
            raise InterruptedError(
                f"stopped by SIGTERM after step {step} of {options.steps}; the checkpoint of step "
                f"{self.checkpoints.steps()[-1]} stands in {self.checkpoints.uri}: the same command goes on from there"
            )

    def _validate(self) -> None:
        """Put the mean loss over the validation batches, in the precision in force, into the last row."""
        assert self.active is not None
        if not self.validation or not self.progress.history:
            return
        count = self.options.validation_samples(len(self.validation))
        total, labels = 0.0, 0
        self.model.eval()
        with torch.no_grad(), self.active.autocast():
            for batch in self._batches(self.validation, list(range(count))):
                total += loss_sum(self.model, *batch.tensors(self.device)).item()
                labels += batch.labels
        if not math.isfinite(total):
            log.warning("step %d: the validation loss is %s; left out of the log", self.progress.step, total)
        elif labels:
            self.progress.history[-1]["validation_loss"] = total / labels

    def _report(self) -> None:
        row = self.progress.history[-1] if self.progress.history else {}
        if row.get("step") != self.progress.step:
            return
        values = {name: row[name] for name in ("loss", "validation_loss", "grad_norm") if name in row}
        speed = self.step_tokens[-1] / self.seconds[-1]
        telemetry.step_line(
            self.progress.step,
            self.options.steps,
            **values,
            lr=row["learning_rate"],
            **{self.precision.speed_name: speed},
        )

    def _roll_back(self, reason: str) -> None:
        """Go back to the last checkpoint and replay in the higher precision, or stop the run."""
        assert self.active is not None
        step, progress = self.progress.step + 1, self.progress
        good = self.checkpoints.steps()
        if self.higher is None:
            verdict = f"{self.active.name} diverged, and no fallback is asked for"
        elif self.active is self.higher:
            verdict = f"{self.active.name} diverges as well: the cause is not {self.precision.name}"
        elif progress.retries >= self.options.fallback_retries:
            verdict = f"{self.active.name} diverged again after {progress.retries} fallbacks"
        else:
            until = min(step + self.options.fallback_steps, self.options.steps)
            event = Event(step, "rolled_back", reason, self.active.name, rolled_back_to=good[-1], replay_until=until)
            self._load(good[-1])
            self.progress.retries = progress.retries + 1
            self.progress.high_until = until
            self.progress.events = [*progress.events, _tell(event)]
            return
        _tell(Event(step, "stopped", reason, self.active.name, verdict=verdict))
        left = f"the last good checkpoint is of step {good[-1]}" if good else "no checkpoint was taken yet"
        raise Diverged(
            f"training diverged at step {step}: {reason}. {verdict}; {left} in {self.checkpoints.uri}. "
            "Try a smaller learning_rate, a longer warm-up, or a higher precision"
        )

    def _end_replay(self) -> None:
        """Record that the higher precision passed the step at which the run's own one diverged."""
        assert self.active is not None
        cause = next(event for event in reversed(self.progress.events) if event["action"] == "rolled_back")
        verdict = f"{self.precision.name} diverged at step {cause['step']} where {self.active.name} does not"
        event = Event(self.progress.step, "recovered", cause["reason"], self.active.name, verdict=verdict)
        self.progress.events.append(_tell(event))

    def _save(self) -> None:
        """Take a checkpoint, unless the guard is suspicious of what it would hold."""
        if self.guard.suspicious:
            log.warning("step %d: the loss is suspicious; no checkpoint now", self.progress.step)
            return
        state = {
            "parameters": {name: item.detach() for name, item in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
            "guard": self.guard.state(),
            "progress": asdict(self.progress),
        }
        history = self.progress.history
        self.checkpoints.save(self.progress.step, state, history[-1]["loss"] if history else None)

    def _load(self, step: int) -> None:
        """Put everything where the checkpoint of `step` has it."""
        state = self.checkpoints.load(step)
        if set(state["parameters"]) != set(self.parameters):
            raise ValueError(f"{self.checkpoints.uri}: the checkpoint's parameters are not this model's")
        with torch.no_grad():
            for name, saved in state["parameters"].items():
                self.parameters[name].copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.restore(state["guard"])
        self.progress = Progress(**state["progress"])
        set_random_state(state["random"])


def _tell(event: Event) -> dict[str, Any]:
    """Write a decision of the guard to the log and the run's events; it as JSON."""
    record = event.record()
    log.warning("guard: %s", json.dumps(record))
    telemetry.emit("guard", **record)
    return record


def _falls_back(options: TrainingOptions, precision: Precision) -> bool:
    """Whether a divergence is to be replayed.

    Raises:
        ValueError: fallback is asked for, and there is no higher precision.
    """
    higher = precision.fallback()
    if options.on_divergence == "fallback" and higher is None:
        raise ValueError(f"on_divergence=fallback: there is no precision above {precision.name}; use stop")
    return options.on_divergence == "fallback" or (
        options.on_divergence == "auto" and higher is not None and precision.token_multiple > 1
    )


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process; outside the main thread it is never set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
