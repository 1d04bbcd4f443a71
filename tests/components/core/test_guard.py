"""The guard: what it calls a divergence and what not, what it decides, and that decisions are a function of state."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.guard import Event, Guard, data_step, decide, recovery, response, take_up
from crosstrain.components.core.precision.numerics import TensorNumerics
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Progress

NAN, INF = float("nan"), float("inf")


def warm(**options: float) -> Guard:
    """A guard that has seen twenty calm losses of 3."""
    guard = Guard(TrainingOptions(**options))
    for _ in range(20):
        assert guard.judge(3.0, 1.0) == ""
    return guard


@pytest.mark.parametrize(
    ("loss", "grad_norm", "words"),
    [
        (NAN, 1.0, "loss is nan"),
        (INF, 1.0, "loss is inf"),
        (3.0, NAN, "gradient norm is nan"),
        (3.0, INF, "norm is inf"),
    ],
)
def test_what_is_not_finite_is_a_divergence_at_once(loss, grad_norm, words):
    assert words in Guard(TrainingOptions()).judge(loss, grad_norm)


def test_a_loss_ten_times_the_mean_is_a_divergence_at_once():
    assert "10 times" in warm().judge(31.0, 1.0)


def test_twice_the_mean_is_one_only_when_it_lasts():
    guard = warm()
    assert [guard.judge(7.0, 1.0) for _ in range(3)] == ["", "", ""]
    assert guard.suspicious
    assert "for 4 steps" in guard.judge(7.0, 1.0)


def test_a_short_spike_passes_and_does_not_move_the_mean():
    guard = warm()
    for loss in (7.0, 7.0, 3.0):
        assert guard.judge(loss, 1.0) == ""
    assert not guard.suspicious
    assert guard.window == [3.0] * 20


def test_the_first_losses_of_a_run_are_no_spike():
    guard = Guard(TrainingOptions())
    assert [guard.judge(loss, 1.0) for loss in (0.1, 9.0, 9.0)] == ["", "", ""]


def test_state_survives():
    guard = warm()
    guard.judge(7.0, 1.0)
    other = Guard(TrainingOptions())
    other.restore(guard.state())
    assert [other.judge(7.0, 1.0) for _ in range(3)] == [guard.judge(7.0, 1.0) for _ in range(3)]


def test_an_event_records_what_applies():
    assert Event(7, "stopped", "the loss is nan", "fp32").record() == {
        "step": 7,
        "action": "stopped",
        "reason": "the loss is nan",
        "precision": "fp32",
    }


def layers(saturation: float, amax: float = 1.0) -> dict[str, dict[str, TensorNumerics]]:
    calm = TensorNumerics(1.0, 0.9, 0.0)
    return {
        "calm": {"input": calm, "weight": calm, "gradient": calm},
        "loud": {"input": TensorNumerics(amax, 0.0, saturation), "weight": calm, "gradient": calm},
    }


@pytest.mark.parametrize(("saturation", "amax"), [(0.2, 1.0), (0.0, INF), (0.0, NAN)])
def test_a_layer_that_saturates_or_is_not_finite_is_a_divergence_and_is_named(saturation, amax):
    guard = warm()
    guard.look(layers(saturation, amax))
    reason = guard.judge(3.0, 1.0, looked=True)
    assert reason.startswith("loud: tensors saturate") and guard.affected == ("loud",)
    assert guard.judge(3.0, 1.0) == "", "an old look judges no new step"


def test_underflow_and_a_little_saturation_are_none_and_neither_is_a_cold_start():
    guard = warm()
    guard.look(layers(0.1))
    assert guard.judge(3.0, 1.0, looked=True) == "" and guard.affected == ()
    cold = Guard(TrainingOptions())
    cold.look(layers(0.5))
    assert cold.judge(3.0, 1.0, looked=True) == "", "a delayed scale has to settle first"


def test_many_layers_are_counted():
    guard = warm()
    guard.look({str(index): layers(0.5)["loud"] for index in range(9)})
    assert guard.judge(3.0, 1.0, looked=True).startswith("0, 1, 2 and 6 more: ")


def test_a_gradient_norm_far_above_its_mean_is_a_divergence_where_a_limit_is_set():
    assert warm().judge(3.0, 1e6) == ""
    guard = warm(grad_norm_limit=50.0)
    assert guard.judge(3.0, 49.0) == ""
    assert "over 50 times the recent mean" in guard.judge(3.0, 200.0)


@pytest.mark.parametrize(
    ("asked", "is_fp8", "has_higher", "answer"),
    [
        ("auto", True, True, "fallback"),
        ("auto", False, True, "stop"),
        ("stop", True, True, "stop"),
        ("skip", False, False, "skip"),
        ("fallback", False, True, "fallback"),
    ],
)
def test_the_answer_to_a_divergence(asked, is_fp8, has_higher, answer):
    assert response(TrainingOptions(on_divergence=asked), "bf16", is_fp8, has_higher) == answer


def test_a_fallback_without_anything_above_is_refused():
    with pytest.raises(ValueError, match="no precision above fp32; use skip or stop"):
        response(TrainingOptions(on_divergence="fallback"), "fp32", False, False)


def go_back(
    answer: Any, progress: Progress, good: int, guard: Guard | None = None, **options: Any
) -> tuple[Event, Progress]:
    """A decision, and the progress after it has been taken up."""
    chosen = TrainingOptions(**{"steps": 100, **options})
    event = decide(answer, chosen, progress, "bad", ("fp8", "fp8"), guard or Guard(chosen), good)
    loaded = Progress(**{**asdict(progress), "step": good})
    if event.action == "rolled_back":
        take_up(event, loaded, progress)
    return event, loaded


def test_a_fallback_replays_all_layers_past_the_divergence_and_says_when_it_is_over():
    event, after = go_back("fallback", Progress(step=29), 20, fallback_steps=5)
    assert event.record() == {
        "step": 30, "action": "rolled_back", "reason": "bad", "precision": "fp8", "rolled_back_to": 20,
        "replay_until": 35,
    }  # fmt: skip
    assert (after.step, after.high_until, after.kept_out, after.retries, after.skipped) == (20, 35, [], 1, [])
    assert recovery(after, "fp8", "bf16") is None
    after.step = 35
    found = recovery(after, "fp8", "bf16")
    assert (
        found is not None
        and found.action == "recovered"
        and found.verdict == "fp8 diverged at step 30 where bf16 does not"
    )


def test_only_the_layers_at_fault_replay_then_all_then_it_stops():
    guard = warm(fallback_layers="affected")
    guard.look(layers(0.5))
    event, after = go_back("fallback", Progress(step=29), 20, guard, fallback_layers="affected")
    assert event.layers == ("loud",) and after.kept_out == ["loud"] and event.record()["layers"] == ["loud"]
    after.step = 24
    event, after = go_back("fallback", after, 20, guard, fallback_layers="affected")
    assert event.action == "rolled_back" and event.layers == () and after.kept_out == [] and after.retries == 2
    after.step = 24
    event, _ = go_back("fallback", after, 20, guard, fallback_layers="affected", fallback_retries=9)
    assert event.action == "stopped" and "the cause is not fp8" in event.verdict


def test_all_layers_replay_where_none_is_known_to_be_at_fault():
    event, _ = go_back("fallback", Progress(step=29), 20, fallback_layers="affected")
    assert event.action == "rolled_back" and event.layers == ()


def test_a_skip_leaves_out_the_last_batches_back_to_the_checkpoint():
    event, after = go_back("skip", Progress(step=29), 20, skip_batches=4)
    assert event.skipped == (26, 27, 28, 29) and after.skipped == [26, 27, 28, 29]
    assert (after.step, after.high_until, after.recovered_at) == (20, 0, 30)
    assert [data_step(step, after.skipped) for step in (25, 26, 27)] == [25, 30, 31]
    after.step = 30
    found = recovery(after, "fp8", "fp8")
    assert found is not None and "does not without global batches 26 to 29" in found.verdict
    short, _ = go_back("skip", Progress(step=21), 20, skip_batches=4)
    assert short.skipped == (20, 21), "what was trained on before the checkpoint is not skipped"


def test_a_second_skip_counts_in_the_order_of_the_data():
    _, after = go_back("skip", Progress(step=29), 20, skip_batches=2)
    after.step = 30
    event, again = go_back("skip", after, 28, skip_batches=2)
    assert event.skipped == (31, 32) and again.skipped == [28, 29, 31, 32]


@pytest.mark.parametrize(("answer", "word"), [("skip", "skips"), ("fallback", "fallbacks")])
def test_retries_are_bounded(answer, word):
    event, _ = go_back(answer, Progress(step=29, retries=2), 20)
    assert event.action == "stopped" and event.verdict == f"fp8 diverged again after 2 {word}"
    event, _ = go_back("stop", Progress(step=29), 20)
    assert event.action == "stopped" and "on_divergence is to stop" in event.verdict


@settings(max_examples=80, deadline=None)
@given(st.sets(st.integers(0, 40)))
def test_steps_take_the_batches_that_are_left_in_order_and_each_once(skipped):
    found = [data_step(step, skipped) for step in range(30)]
    assert found == [index for index in range(100) if index not in skipped][:30]
