"""The loop: accumulation, exact resume, and what happens when a run goes wrong."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchao.float8 import float8_scaling_utils
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core import training
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.checkpoint_files import StoreReader
from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.core.guard import Diverged
from crosstrain.components.core.optimization import learning_rate, make_optimizer, undecayed
from crosstrain.components.core.parallel import engine
from crosstrain.components.core.precision import choose
from crosstrain.components.core.training import train
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Outcome

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "steps": 12, "global_batch_size": 4, "micro_batch_size": 2, "warmup_steps": 2, "learning_rate": 3e-3,
    "evaluate_every": 0, "checkpoint_every": 4, "threads": 1,
}  # fmt: skip


def llama(dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def walk(length: int, seed: int) -> Sample:
    ids = np.cumsum(np.random.default_rng(seed).integers(1, 4, length)) % 64
    return Sample(ids, np.where(np.arange(length) == 0, IGNORE, ids), np.arange(length))


SAMPLES = [walk(16, seed) for seed in range(10)]


class Recorder(list[Sample]):
    """A data set that remembers what was read."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__(samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        self.read.append(index)
        return super().__getitem__(index)


Go = Callable[..., tuple[LlamaForCausalLM, Outcome]]


@pytest.fixture
def go(tmp_path: Path) -> Go:
    """Train a fresh model; the state is the test's own unless `state` names another."""

    def run(
        samples: list[Sample] = SAMPLES,
        precision: str = "fp32",
        state: str = "state",
        validation: list[Sample] | None = None,
        model: nn.Module | None = None,
        **options: Any,
    ) -> tuple[LlamaForCausalLM, Outcome]:
        model = model or llama()
        chosen = TrainingOptions.decode({**OPTIONS, **options})
        checkpoints = Checkpoints(str(tmp_path / state), "0" * 64, "train_fp8", {}, {}, keep=chosen.keep_checkpoints)
        outcome = train(
            model,
            samples,
            chosen,
            choose(precision, CPU, minimum_features=16),
            checkpoints,
            validation=validation,  # type: ignore[arg-type]
        )
        return model, outcome  # type: ignore[return-value]

    return run


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """The float tensors of the newest checkpoint."""
    saved = Checkpoints(str(folder / "state"), "0" * 64, "train_fp8", {}, {}, keep=9)
    step = saved.steps()[-1]
    plan = StoreReader(Artifact.open(f"{saved.uri}/step-{step:08d}")).read_metadata()
    tensors = {
        name: torch.empty(item.size)
        for name, item in plan.state_dict_metadata.items()
        if item.properties.dtype == torch.float32
    }
    saved.load(step, tensors)
    return tensors


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), (_, right) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_it_learns_and_says_how(go):
    model, outcome = go(precision="fp8", steps=30, validation=SAMPLES[:3], evaluate_every=10)
    losses = [row["loss"] for row in outcome.history]
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in outcome.history] == list(range(1, 31))
    assert [row["step"] for row in outcome.history if "validation_loss" in row] == [10, 20, 30]
    assert set(outcome.history[0]) == {"step", "loss", "grad_norm", "learning_rate", "tokens"}
    assert outcome.tokens == outcome.history[-1]["tokens"] == 30 * 4 * 16
    assert outcome.train_loss == losses[-1] and outcome.guard_events == ()
    assert [json.loads(line) for line in outcome.log_lines().splitlines()] == outcome.history
    assert not model.training and type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(go, precision):
    """Rows with unequal numbers of labels, one without any: per-token mean over the whole global batch."""
    uneven = [walk(length, length) for length in (16, 5, 9, 2)]
    uneven[2] = Sample(uneven[2].input_ids, np.full(9, IGNORE), uneven[2].position_ids)
    whole = go(uneven, precision=precision, state="a", micro_batch_size=4, steps=3, model=llama(0.0))
    parts = go(uneven, precision=precision, state="b", micro_batch_size=1, steps=3, model=llama(0.0))
    tolerance = 1e-5 if precision == "fp32" else 2e-2  # one scale a tensor: another cut has other scales
    for left, right in zip(whole[1].history, parts[1].history, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=tolerance)
        assert left["tokens"] == right["tokens"]
    if precision == "fp32":
        for (name, left), right in zip(weights(whole[0]).items(), weights(parts[0]).values(), strict=True):
            assert torch.allclose(left, right, atol=1e-4), name


def test_a_global_batch_without_a_label_is_skipped_and_counted(go):
    blank = Sample(SAMPLES[0].input_ids, np.full(16, IGNORE), SAMPLES[0].position_ids)
    _, outcome = go([SAMPLES[0], blank], global_batch_size=1, micro_batch_size=1, steps=6)
    assert (outcome.steps, outcome.unlabelled_steps, len(outcome.history)) == (6, 3, 3)
    assert all(np.isfinite(row["loss"]) for row in outcome.history)


def test_frozen_parameters_are_not_touched_and_not_saved(go, tmp_path):
    model = llama()
    for name, item in model.named_parameters():
        item.requires_grad = "mlp" in name
    before = weights(model)
    go(model=model)
    changed = {name for name, item in model.named_parameters() if not torch.equal(item, before[name])}
    assert changed == {name for name in before if "mlp" in name}
    saved = state_of(tmp_path)
    assert {name.removeprefix("parameter.") for name in saved if name.startswith("parameter.")} == changed


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
@pytest.mark.parametrize("stop_at", [4, 7])
def test_a_stopped_run_goes_on_as_if_it_had_not(go, monkeypatch, precision, stop_at):
    """SIGTERM in the second epoch of ten samples: same order, losses, weights; with dropout, to the bit."""
    reference, whole = Recorder(SAMPLES), Recorder(SAMPLES)
    model, outcome = go(reference, precision=precision, state="reference")
    real = training._Run._step

    def step(run: Any) -> str:
        if run.progress.step == stop_at - 1:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    monkeypatch.setattr(training._Run, "_step", step)
    with pytest.raises(InterruptedError, match=rf"after step {stop_at} of 12.*step {stop_at} stands"):
        go(whole, precision=precision)
    monkeypatch.undo()
    resumed, rest = go(whole, precision=precision)
    assert rest.resumed_from == stop_at
    assert whole.read == reference.read
    assert rest.history == outcome.history
    assert_same(model, resumed)


def test_the_guard_stops_a_run_that_blows_up_and_leaves_a_good_checkpoint(go, tmp_path):
    with pytest.raises(Diverged, match=r"training diverged at step \d+: .*fp32 diverged.*checkpoint is of step"):
        go(learning_rate=1e4, clip_norm=1e9, warmup_steps=0, steps=40, checkpoint_every=2, spike_limit=3.0)
    saved = state_of(tmp_path)
    assert all(item.isfinite().all() for item in saved.values())
    assert any(name.startswith("parameter.") for name in saved)


def test_no_checkpoint_is_taken_while_the_loss_is_suspicious(go, monkeypatch):
    """Losses three times too high from step 8 on: the checkpoint due then is not taken, and step 11 ends the run."""
    real, count = engine.loss_sum, [0]

    def loss_sum(*args: Any) -> torch.Tensor:
        count[0] += 1
        return real(*args) * (3.0 if count[0] > 7 * 2 else 1.0)

    monkeypatch.setattr(engine, "loss_sum", loss_sum)
    with pytest.raises(Diverged, match=r"step 11: .* for 4 steps.*checkpoint is of step 4 "):
        go()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Break torchao's scales after `first` casts until `last` are done: what is multiplied by them becomes NaN."""

    def inject(first: int, last: int) -> None:
        real, count = float8_scaling_utils.tensor_to_scale, [0]

        def scale(*args: Any, **kwargs: Any) -> torch.Tensor:
            count[0] += 1
            return real(*args, **kwargs) * (float("nan") if first < count[0] <= last else 1.0)

        monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", scale)

    return inject


CASTS = 2 * 14 * 6
"""Casts a step: two micro-batches, fourteen linears, two operands in each of three products."""


def test_fp8_that_diverges_is_rolled_back_and_replayed_in_fp32(go, fault):
    fault(6 * CASTS, 6 * CASTS + 1)  # in step 7; the checkpoint before it is of step 4
    model, outcome = go(precision="fp8", fallback_steps=2)
    rolled, recovered = outcome.guard_events
    assert rolled == {
        "step": 7,
        "action": "rolled_back",
        "reason": "the loss is nan",
        "precision": "fp8-torchao-emulated",
        "rolled_back_to": 4,
        "replay_until": 9,
    }
    assert (recovered["step"], recovered["action"], recovered["precision"]) == (9, "recovered", "fp32")
    assert recovered["verdict"] == "fp8-torchao-emulated diverged at step 7 where fp32 does not"
    assert [row["step"] for row in outcome.history] == list(range(1, 13))
    assert all(np.isfinite(row["loss"]) for row in outcome.history)
    assert all(item.isfinite().all() for item in model.parameters())


def test_the_replay_is_in_fp32_and_starts_from_the_checkpoint(go, fault):
    _, plain = go(precision="fp8", state="plain")
    fault(6 * CASTS, 6 * CASTS + 1)
    _, outcome = go(precision="fp8", fallback_steps=2)
    assert outcome.history[:4] == plain.history[:4]
    assert outcome.history[4]["loss"] != plain.history[4]["loss"]
    assert outcome.history[4]["loss"] == pytest.approx(plain.history[4]["loss"], rel=0.02)


def test_fp8_that_keeps_diverging_is_stopped(go, fault):
    fault(6 * CASTS, 10**9)
    with pytest.raises(Diverged, match="diverged again after 1 fallbacks"):
        go(precision="fp8", fallback_steps=1, fallback_retries=1, steps=30)


def test_a_divergence_that_fp32_shares_is_not_put_down_to_fp8(go):
    bad = dict(learning_rate=1e4, clip_norm=1e9, warmup_steps=0, steps=40, checkpoint_every=2, spike_limit=3.0)
    with pytest.raises(Diverged, match="fp32 diverges as well: the cause is not fp8-torchao-emulated"):
        go(precision="fp8", fallback_steps=40, **bad)


def test_a_run_stopped_in_a_replay_goes_on_in_it(go, fault, monkeypatch):
    fault(6 * CASTS, 6 * CASTS + 1)
    model, whole = go(precision="fp8", fallback_steps=4, state="reference")
    monkeypatch.undo()
    fault(6 * CASTS, 6 * CASTS + 1)
    real = training._Run._step

    def step(run: Any) -> str:
        if run.progress.step == 7 and run.progress.retries:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    monkeypatch.setattr(training._Run, "_step", step)
    with pytest.raises(InterruptedError):
        go(precision="fp8", fallback_steps=4)
    monkeypatch.undo()
    resumed, rest = go(precision="fp8", fallback_steps=4)
    assert rest.resumed_from == 8
    assert rest.guard_events == whole.guard_events and rest.history == whole.history
    assert_same(model, resumed)


def test_on_divergence_stop_holds_for_fp8_too(go, fault):
    fault(6 * CASTS, 6 * CASTS + 1)
    with pytest.raises(Diverged, match="step 7"):
        go(precision="fp8", on_divergence="stop")


def test_fallback_without_a_higher_precision_is_refused(go):
    with pytest.raises(ValueError, match="no precision above fp32"):
        go(on_divergence="fallback")


@pytest.mark.slow
def test_compiled_training_follows_the_plain_one(go):
    _, plain = go(precision="fp8", state="a", steps=3)
    _, compiled = go(precision="fp8", state="b", steps=3, compile=True)
    for left, right in zip(plain.history, compiled.history, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=5e-3)


def test_weight_decay_leaves_norms_and_embeddings_out():
    model = llama()
    parameters = dict(model.named_parameters())
    decayed, kept = make_optimizer(parameters, TrainingOptions(weight_decay=0.1), undecayed(model)).param_groups
    names = {id(item): name for name, item in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(names[id(item)].endswith("_proj.weight") for item in decayed["params"])
    assert {names[id(item)] for item in kept["params"]} == {
        name for name in names.values() if "norm" in name or "embed" in name
    }


def test_learning_rate_warms_up_and_decays():
    options = TrainingOptions(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_global_batch_that_micro_batches_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="nearest: 8 or 12"):
        TrainingOptions.decode({"global_batch_size": 10, "micro_batch_size": 4})


def test_fewer_samples_than_ranks_would_be_refused(go):
    with pytest.raises(ValueError, match="0 samples for 1 ranks"):
        go([])
