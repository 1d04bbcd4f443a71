"""The guard: what it calls a divergence, and what not."""

import pytest

from crosstrain.components.core.guard import Event, Guard
from crosstrain.components.core.training_config import TrainingOptions

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
