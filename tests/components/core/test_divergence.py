"""Runs that go wrong on purpose: data that cannot be learned from, layers that saturate, scales that must survive."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core import telemetry, training
from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.data import IGNORE, BatchPlan, Sample
from crosstrain.components.core.guard import Diverged
from crosstrain.components.core.parallel import engine
from crosstrain.components.core.precision import choose
from crosstrain.components.core.precision.emulated import EmulatedFp8
from crosstrain.components.core.training import train
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_recovery import Recovery
from crosstrain.components.core.training_state import Outcome

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "steps": 12, "global_batch_size": 4, "micro_batch_size": 2, "warmup_steps": 2, "learning_rate": 3e-3,
    "evaluate_every": 0, "checkpoint_every": 4, "threads": 1,
}  # fmt: skip
LAYER = "model.layers.1.mlp.up_proj"


def walk(length: int, seed: int) -> Sample:
    ids = np.cumsum(np.random.default_rng(seed).integers(1, 4, length)) % 64
    return Sample(ids, np.where(np.arange(length) == 0, IGNORE, ids), np.arange(length))


class Data(list[Sample]):
    """64 samples that remember what was read."""

    def __init__(self) -> None:
        super().__init__(walk(16, seed) for seed in range(64))
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        self.read.append(index)
        return super().__getitem__(index)


Go = Callable[..., tuple[LlamaForCausalLM, Outcome]]


@pytest.fixture
def go(tmp_path: Path) -> Go:
    """Train a fresh model; the state is the test's own unless `state` names another."""

    def run(
        data: Data | None = None, precision: str = "fp32", state: str = "state", recipe: str = "delayed", **options: Any
    ) -> tuple[LlamaForCausalLM, Outcome]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, tie_word_embeddings=True, attention_dropout=0.1,
        ))  # fmt: skip
        chosen = TrainingOptions.decode({**OPTIONS, **options})
        checkpoints = Checkpoints(str(tmp_path / state), "0" * 64, "train_fp8", {}, {}, keep=chosen.keep_checkpoints)
        format = choose(precision, CPU, recipe=recipe, minimum_features=16, amax_history=8)  # type: ignore[arg-type]
        return model, train(model, data or Data(), chosen, format, checkpoints)

    return run


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), (_, right) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the loss over some global batches of the data NaN, whenever they are read."""
    plan = BatchPlan(64, 4, 0)

    def inject(*batches: int) -> None:
        bad = {tuple(Data()[int(index)].input_ids) for step in batches for index in plan.indices(step)}
        real = engine.loss_sum

        def loss_sum(model: nn.Module, ids: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
            is_bad = any(tuple(row[:16].tolist()) in bad for row in ids)
            return real(model, ids, *args) * (float("nan") if is_bad else 1.0)

        monkeypatch.setattr(engine, "loss_sum", loss_sum)

    return inject


def test_the_batch_that_a_run_fell_over_is_left_out_and_nothing_else(go, poison):
    poison(6)
    data = Data()
    _, outcome = go(data, on_divergence="skip")
    rolled, recovered = outcome.guard_events
    assert rolled == {
        "step": 7, "action": "rolled_back", "reason": "the loss is nan", "precision": "fp32", "rolled_back_to": 4,
        "skipped": [6],
    }  # fmt: skip
    assert (recovered["step"], recovered["action"]) == (7, "recovered")
    assert recovered["verdict"] == "fp32 diverged at step 7, and does not without global batches 6 to 6"
    plan = BatchPlan(64, 4, 0)
    wanted = [*range(7), 4, 5, *range(7, 13)]
    assert data.read == [int(index) for step in wanted for index in plan.indices(step)]
    assert [row["step"] for row in outcome.history] == list(range(1, 13))
    assert all(np.isfinite(row["loss"]) for row in outcome.history)


@pytest.mark.parametrize("stop_before", [5, 9])
def test_a_run_stopped_after_a_skip_goes_on_without_the_same_batches(go, poison, monkeypatch, stop_before):
    """Stopped while it does the steps again, and after them."""
    poison(6)
    model, whole = go(on_divergence="skip", skip_batches=2, state="reference", precision="fp8")
    real = training._Run._step

    def step(run: Any) -> str:
        if run.progress.step == stop_before and run.progress.retries:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_step", step)
        with pytest.raises(InterruptedError):
            go(on_divergence="skip", skip_batches=2, precision="fp8")
    data = Data()
    resumed, rest = go(data, on_divergence="skip", skip_batches=2, precision="fp8")
    assert rest.resumed_from == stop_before + 1
    assert rest.guard_events == whole.guard_events and rest.guard_events[0]["skipped"] == [5, 6]
    assert rest.history == whole.history
    assert_same(model, resumed)


def test_skips_are_bounded_and_the_last_good_checkpoint_stands(go, poison):
    poison(*range(6, 12))
    with pytest.raises(
        Diverged, match=r"step 7: .*diverged again after 2 skips; the last good checkpoint is of step 4 "
    ):
        go(on_divergence="skip")


def saturate(monkeypatch: pytest.MonkeyPatch, after_step: int, *layers: str) -> None:
    """Give some layers delayed scales that are far too large, from the end of a step on."""
    real, seen = EmulatedFp8.update, [0]

    def update(precision: EmulatedFp8, side: str) -> None:
        real(precision, side)
        seen[0] += side == "forward"
        for name in layers if seen[0] >= 2 * after_step else ():
            precision.scales[name].scale["forward"][:] = 1e6

    monkeypatch.setattr(EmulatedFp8, "update", update)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "emit", lambda event, **fields: found.append({"event": event, **fields}))
    return found


def test_a_layer_that_saturates_falls_back_alone_and_the_run_recovers(go, monkeypatch):
    events = watched(monkeypatch)
    saturate(monkeypatch, 5, LAYER)
    options = {"precision": "fp8", "fp8_numerics_every": 1, "fallback_layers": "affected", "fallback_steps": 10}
    _, outcome = go(**options)
    rolled, recovered = outcome.guard_events
    assert rolled["reason"].startswith(f"{LAYER}: tensors saturate in fp8") and rolled["layers"] == [LAYER]
    assert (rolled["step"], rolled["rolled_back_to"], rolled["replay_until"]) == (6, 4, 12)
    assert recovered["precision"] == "fp8-delayed-emulated, 1 modules in fp32"
    assert "diverged at step" in recovered["verdict"] and recovered["step"] == 12
    assert [event["action"] for event in events if event["event"] == "guard"] == ["rolled_back", "recovered"]
    assert all(np.isfinite(row["loss"]) for row in outcome.history)


def test_when_other_layers_saturate_as_well_all_fall_back(go, monkeypatch):
    both = (LAYER, "model.layers.0.mlp.up_proj")
    saturate(monkeypatch, 5, *both)
    found: list[str] = []
    real = Recovery.switch
    monkeypatch.setattr(Recovery, "switch", lambda self, to, step: (found.append(to.name), real(self, to, step))[1])
    monkeypatch.setattr(training.Guard, "look", _only_first(training.Guard.look))
    _, outcome = go(precision="fp8", fp8_numerics_every=1, fallback_layers="affected", fallback_steps=10)
    actions = [(event["action"], event.get("layers")) for event in outcome.guard_events]
    assert actions == [("rolled_back", [both[1]]), ("rolled_back", None), ("recovered", None)]
    assert list(dict.fromkeys(found)) == ["fp8-delayed-emulated", "fp8-delayed-emulated, 1 modules in fp32", "fp32"]


def _only_first(real: Callable[..., None]) -> Callable[..., None]:
    """A look that finds one layer at a time, as when the second shows only once the first is out of the way."""

    def look(guard: Any, layers: Any) -> None:
        real(guard, layers)
        guard.affected = tuple(sorted(guard.affected))[:1]

    return look


def test_numbers_are_in_the_log_every_n_steps_and_change_no_bit(go, monkeypatch):
    events = watched(monkeypatch)
    plain, quiet = go(precision="fp8", state="quiet")
    model, outcome = go(precision="fp8", fp8_numerics_every=3)
    assert_same(plain, model)
    rows = [row["step"] for row in outcome.history if "fp8_gradient_underflow" in row]
    assert rows == [3, 6, 9, 12] and not [row for row in quiet.history if "fp8_gradient_underflow" in row]
    tables = [event for event in events if event["event"] == "fp8_numerics"]
    assert [event["step"] for event in tables] == [3, 6, 9, 12]
    assert set(tables[0]["layers"][LAYER]) == {"input", "weight", "gradient"}
    json.dumps(tables, allow_nan=False)


def test_delayed_scales_are_resumed_bit_for_bit(go, monkeypatch):
    model, whole = go(precision="fp8", state="reference")
    real = training._Run._step

    def step(run: Any) -> str:
        if run.progress.step == 5:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "_step", step)
        with pytest.raises(InterruptedError):
            go(precision="fp8")
    resumed, rest = go(precision="fp8")
    assert rest.resumed_from == 6 and rest.history == whole.history
    assert_same(model, resumed)


def test_the_first_micro_batch_of_a_step_is_told(go, monkeypatch):
    told: list[bool | None] = []
    real = EmulatedFp8.autocast
    monkeypatch.setattr(
        EmulatedFp8, "autocast", lambda self, first_micro_batch=None: (told.append(first_micro_batch), real(self))[1]
    )
    go(precision="fp8", steps=2)
    assert told == [True, False, True, False]
