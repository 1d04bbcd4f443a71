"""The training loop: one function, `train`, for every component that trains.

    outcome = train(model, dataset, options, precision, checkpoints, validation=held_out)

`model` is a Hugging Face causal LM, or one that peft wrapped; every parameter that requires a gradient is
trained, and only those are checkpointed. `dataset` has `len()` and gives a `Sample` for an index (ShardDataset,
or any other; samples may differ in length). The loss is the sum of the tokens' cross-entropies over the number
of labels in the whole global batch, so that it does not depend on how the batch is cut into ranks and micro-batches.
The order of samples is `BatchPlan`'s, a function of the step alone; with the checkpoint's weights, optimizer and
random state that makes a resumed run bit-equal to one never stopped, on a CPU with as many threads and ranks.

In several processes every rank calls `train` with its `world` and the same `layout`; how the model then lies is
core/parallel's. The ranks agree on loss, gradient norm and signals once a step, so that each decides alike.

A step that goes wrong is not applied, and core/guard decides what then: the run goes back to its last checkpoint,
which is never taken while the guard is suspicious, and replays in a higher precision or without the data it fell
over; what was decided is in the outcome. Left out on purpose: what becomes of the weights.
"""

import logging
import math
import statistics
import threading
import time
from contextlib import nullcontext

import torch
from torch import distributed, nn

from crosstrain.components.core import telemetry
from crosstrain.components.core.batch import accept_pads
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.guard import Guard, data_step
from crosstrain.components.core.optimization import learning_rate
from crosstrain.components.core.parallel.engine import make_engine
from crosstrain.components.core.parallel.layout import Layout
from crosstrain.components.core.parallel.sharding import recompute
from crosstrain.components.core.parallel.world import ALONE, World
from crosstrain.components.core.precision import Precision
from crosstrain.components.core.precision.numerics import Watch, merge, summary
from crosstrain.components.core.reproducible import reproducible, seed_rank
from crosstrain.components.core.stopping import sigterm
from crosstrain.components.core.training_checkpoint import Parts
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_feed import Feed
from crosstrain.components.core.training_metrics import Metrics
from crosstrain.components.core.training_recovery import Recovery
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
    world: World = ALONE,
    layout: Layout | None = None,
    device: torch.device | None = None,
) -> Outcome:
    """Train a model in place, resuming from the run's last checkpoint when there is one.

    Args:
        model: In fp32, not converted. In one process it comes back plain and in eval mode; in several it is taken
            apart, and the outcome has its weights.
        dataset: At least one sample.
        options: How.
        precision: What arithmetic; see core/precision.
        checkpoints: Where state is kept, for this very run.
        validation: Held-out samples; None or empty: no validation loss.
        world: The processes that train together.
        layout: How the model lies on them, as `check_layout` gave it; None: whole, in one process.
        device: Where this process computes; None: where the model is.

    Raises:
        ValueError: too few samples, or a checkpoint that does not load.
        Diverged: the guard stopped the run; the last good checkpoint stands.
        InterruptedError: SIGTERM came; a checkpoint was saved.
    """
    layout = layout or Layout(micro_batch=options.micro_batch_size)
    device = device or next(model.parameters()).device
    with reproducible(options.threads), sigterm() as stop, checkpoints:
        return _Run(model, dataset, options, precision, checkpoints, validation, stop, world, layout, device).train()


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
        world: World,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self.model, self.options, self.validation = model, options, validation
        self.precision, self.checkpoints, self.stop = precision, checkpoints, stop
        self.world, self.layout = world, layout
        self.compiles = options.compile or device.type == "neuron"
        self.guard = Guard(options)
        self.recovery = Recovery(model, options, precision, self.guard, checkpoints, world)
        if precision.token_multiple > 1:
            accept_pads(model)
        recompute(model, options.activation_checkpointing)
        self.progress = Progress()
        self.metrics = Metrics(checkpoints.uri, model, options, precision, device, world)
        if world.size > 1:
            self.recovery.switch(precision, 0)  # what is sharded is what was converted
            if layout.pipeline == 1 and distributed.group.WORLD is not None:
                precision.reduce_over(distributed.group.WORLD)
        self.engine = make_engine(model, options, device, world, layout)
        self.feed = Feed(dataset, validation, options, self.engine, world, layout, precision.token_multiple)
        self.parts = Parts(self.engine, self.guard, precision, layout, options.seed)
        self.stop_agreed = False
        self.seconds: list[float] = []
        self.step_tokens: list[int] = []

    def train(self) -> Outcome:
        resumed_from = self._start()
        tokens_resumed = self.progress.tokens
        try:
            with self.metrics:
                while self.progress.step < self.options.steps:
                    self.recovery.enter(self.progress)
                    if reason := self._step():
                        self.progress = self.recovery.roll_back(reason, self.progress, self._load)
                    else:
                        self._after_step()
        finally:
            if self.world.size == 1:
                self.recovery.leave()
            self.model.eval()
        self.checkpoints.finish()
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
            tokens_resumed=tokens_resumed,
            compile_seconds=self._compile_seconds(),
            stalls=tuple(self.checkpoints.stalls),
            weights=self.engine.weights,
        )

    def _compile_seconds(self) -> float:
        """How much longer the first step took than the others, where it compiles: compiling and warming up."""
        if not self.compiles or len(self.seconds) < 2:
            return 0.0
        return max(0.0, self.seconds[0] - statistics.median(self.seconds[1:]))

    def _start(self) -> int:
        """Take up the last checkpoint, or seed everything; the step to begin at."""
        self.checkpoints.clear_torn()
        if saved := self.checkpoints.steps():
            self.progress = self._load(saved[-1])
            log.info("resuming at step %d from %s", saved[-1], self.checkpoints.uri)
            return saved[-1]
        self.metrics.forget(0)
        seed_rank(self.options.seed, 0, self.engine.data_rank)
        if self.recovery.answer != "stop":
            self._save()
        return 0

    def _step(self) -> str:
        """Do one optimizer step; or leave the weights as they are and say why the step is a divergence."""
        active = self.recovery.active
        started = time.perf_counter()
        position = data_step(self.progress.step, self.progress.skipped)
        batches, labels, tokens = self.feed.step(position)
        if not labels:
            log.warning("step %d: no token of the global batch has a label; skipped", self.progress.step + 1)
            self.progress.step += 1
            self.progress.unlabelled_steps += 1
            return ""
        self.model.train()
        every = self.options.fp8_numerics_every
        looks = bool(every) and (self.progress.step + 1) % every == 0
        with active.watch(self.model) if looks else nullcontext() as watch:
            total = self.engine.backward(batches, labels, active.autocast)
        numerics = self._look(watch) if watch is not None else {}
        norm = self.engine.clip(self.options.clip_norm)
        loss_value, norm_value = self._agree(*torch.stack([total, norm]).tolist())
        rate = learning_rate(self.progress.step, self.options)
        if not (reason := self.guard.judge(loss_value, norm_value, looks)):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
            self.engine.optimizer.step()
            self.progress.step += 1
            self.progress.tokens += tokens
            self.progress.history.append(
                {
                    "step": self.progress.step,
                    "loss": loss_value,
                    "grad_norm": norm_value,
                    "learning_rate": rate,
                    "tokens": self.progress.tokens,
                    **numerics,
                }
            )
        self.engine.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - started)
        self.step_tokens.append(tokens)
        return reason

    def _look(self, watch: Watch) -> dict[str, float]:
        """Have the guard see fp8's numbers of all ranks; the worst of them, for the log."""
        layers = merge(self.world.gather(watch.layers()))
        self.guard.look(layers)
        if self.world.first and layers:
            tables = {name: {role: item.record() for role, item in roles.items()} for name, roles in layers.items()}
            telemetry.emit("fp8_numerics", step=self.progress.step + 1, layers=tables)
        return summary(layers)

    def _agree(self, loss: float, norm: float) -> tuple[float, float]:
        """The whole batch's loss and gradient norm, the same on every rank; and whether one of them is to stop."""
        if self.world.size == 1:
            return loss, norm
        mine = [loss if self.engine.counts else 0.0, norm if self.world.first else 0.0, float(self.stop.is_set())]
        loss, norm, stops = self.world.sum(mine)
        self.stop_agreed = stops > 0
        return loss, norm

    def _after_step(self) -> None:
        """Validation, progress line, end of a replay, checkpoint, SIGTERM: in this order."""
        step, options = self.progress.step, self.options
        is_last = step == options.steps
        if is_last or (options.evaluate_every and step % options.evaluate_every == 0):
            self._validate()
        self._report(is_last or step % options.log_every == 0)
        self.recovery.note(self.progress)
        stopping = self.stop.is_set() if self.world.size == 1 else self.stop_agreed
        if is_last or stopping or step % options.checkpoint_every == 0:
            self._save()
        if stopping:
            raise InterruptedError(
                f"stopped by SIGTERM after step {step} of {options.steps}; the checkpoint of step "
                f"{self.checkpoints.steps()[-1]} stands in {self.checkpoints.uri}: the same command goes on from there"
            )

    def _validate(self) -> None:
        """Put the mean loss over the validation batches, in the precision in force, into the last row."""
        if not self.validation or not self.progress.history:
            return
        mine = self.engine.evaluate(self.feed.validation(), self.recovery.active.autocast)
        total, labels = self.world.sum(mine if self.engine.counts else (0.0, 0.0))
        if not math.isfinite(total):
            log.warning("step %d: the validation loss is %s; left out of the log", self.progress.step, total)
        elif labels:
            self.progress.history[-1]["validation_loss"] = total / labels

    def _report(self, says: bool) -> None:
        """Put the step into the run's metrics, and on the log where that is due."""
        row = self.progress.history[-1] if self.progress.history else {}
        if row.get("step") != self.progress.step or not self.world.first:
            return
        took = self.metrics.add(row, self.step_tokens[-1], self.seconds[-1])
        values = {name: row[name] for name in ("loss", "validation_loss", "grad_norm") if name in row}
        if says:
            telemetry.step_line(self.progress.step, self.options.steps, **values, lr=row["learning_rate"], **took)

    def _save(self) -> None:
        """Take a checkpoint, unless the guard is suspicious of what it would hold."""
        if self.guard.suspicious:
            log.warning("step %d: the loss is suspicious; no checkpoint now", self.progress.step)
            return
        self.metrics.flush()
        self.parts.save(self.checkpoints, self.progress)

    def _load(self, step: int) -> Progress:
        """Put everything where the checkpoint of `step` has it; the progress then."""
        self.metrics.forget(step)
        return self.parts.load(self.checkpoints, step)
