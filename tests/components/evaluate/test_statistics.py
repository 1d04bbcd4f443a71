"""Intervals against closed forms, and the verdict at its edges."""

import numpy as np
import pytest

from crosstrain.components.evaluate.losses import Pieces
from crosstrain.components.evaluate.statistics import Interval, choose_unit, compare, describe, judge, perplexity


def pieces(loss: np.ndarray, tokens: np.ndarray, sample: np.ndarray | None = None) -> Pieces:
    """One piece a document; `loss` is its sum."""
    number = np.arange(loss.size)
    hits = (tokens / 2).astype(np.int64)
    return Pieces(number if sample is None else sample, number, tokens, loss, hits)


@pytest.fixture
def measured() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, baseline's and candidate's summed losses of 200 documents; differences are small and correlated."""
    source = np.random.default_rng(3)
    tokens = np.full(200, 50)
    baseline = tokens * source.normal(3.0, 0.5, 200)
    return tokens, baseline, baseline - tokens * source.normal(0.05, 0.1, 200)


def test_the_interval_is_that_of_the_mean_when_documents_are_of_one_length(measured):
    tokens, baseline, candidate = measured
    found = compare(pieces(baseline, tokens), pieces(candidate, tokens), 4000, 0).improvement
    differences = (baseline - candidate) / tokens
    half = 1.96 * differences.std(ddof=1) / np.sqrt(differences.size)
    assert found.value == pytest.approx(differences.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.08)
    assert found.value - found.low == pytest.approx(half, rel=0.08)


def test_the_interval_of_a_ratio_is_that_of_linearisation():
    source = np.random.default_rng(4)
    tokens = source.integers(5, 400, 300)
    loss = tokens * source.normal(3.0, 0.4, 300)
    found = compare(pieces(loss, tokens), pieces(loss * 0.9, tokens), 4000, 0).baseline_loss
    ratio = loss.sum() / tokens.sum()
    error = np.sqrt(((loss - ratio * tokens) ** 2).sum()) / tokens.sum()
    assert found.value == pytest.approx(ratio)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.08)


def test_the_difference_is_paired(measured):
    tokens, baseline, candidate = measured
    found = compare(pieces(baseline, tokens), pieces(candidate, tokens), 2000, 0)
    paired = found.improvement.high - found.improvement.low
    assert paired < 0.5 * (found.baseline_loss.high - found.baseline_loss.low)
    assert found.improvement.value == pytest.approx(found.baseline_loss.value - found.candidate_loss.value)


def test_the_same_seed_gives_the_same_interval(measured):
    tokens, baseline, candidate = measured
    one, two, three = (compare(pieces(baseline, tokens), pieces(candidate, tokens), 300, seed) for seed in (7, 7, 8))
    assert one == two
    assert one.improvement != three.improvement


def test_equal_models_differ_by_exactly_nothing_and_pass_at_margin_0(measured):
    tokens, baseline, _ = measured
    found = compare(pieces(baseline, tokens), pieces(baseline.copy(), tokens), 300, 0)
    assert found.improvement == Interval(0.0, 0.0, 0.0) == found.accuracy_gain
    assert judge(found.improvement, 0.0)
    assert describe(found.improvement) == "identical"


def test_documents_count_once_however_many_samples_cut_them():
    baseline = Pieces(*(np.array(x) for x in ([0, 0, 1, 2], [0, 1, 1, 1], [5, 3, 9, 2])), np.ones(4), np.ones(4, int))
    found = compare(baseline, baseline, 50, 0)
    assert found.documents == 2
    assert found.tokens == 19


@pytest.mark.parametrize(
    ("interval", "margin", "passed", "finding"),
    [
        (Interval(0.2, 0.1, 0.3), 0.0, True, "significantly better"),
        (Interval(0.2, 0.0, 0.3), 0.0, True, "no significant difference"),
        (Interval(0.2, -0.01, 0.3), 0.0, False, "no significant difference"),
        (Interval(0.2, -0.01, 0.3), 0.01, True, "no significant difference"),
        (Interval(-0.2, -0.3, -0.1), 0.0, False, "significantly worse"),
        (Interval(-0.2, -0.3, -0.1), 0.3, True, "significantly worse"),
        (Interval(-0.2, -0.3, -0.1), 0.29, False, "significantly worse"),
    ],
)
def test_the_verdict_at_its_edges(interval, margin, passed, finding):
    assert judge(interval, margin) is passed
    assert describe(interval) == finding


def test_what_is_resampled_and_why():
    assert choose_unit(20, 3) == ("document", "")
    unit, reason = choose_unit(19, 50)
    assert unit == "sample" and "Only 19 documents" in reason and "too narrow" in reason
    unit, reason = choose_unit(19, 4)
    assert unit == "document" and "rough" in reason
    with pytest.raises(ValueError, match="at least two"):
        choose_unit(1, 1)


def test_perplexity_is_the_exponential_of_each_end():
    found = perplexity(Interval(1.0, 0.0, 2.0))
    assert (found.low, found.value, found.high) == pytest.approx((1.0, np.e, np.e**2))
    assert perplexity(Interval(1e4, 1e4, 1e4)).value == np.inf
