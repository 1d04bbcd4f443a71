"""On two ranks as in one process: fp8 and its scales, recomputation, and what the guard decides.

With one sequence a forward pass, fp8's scales of the moment are of the same tensors in every layout; what is left is
that sums in another order turn some roundings. Delayed scales are of a whole step's batch, by a maximum over ranks.
"""

import pytest

ONE_SEQUENCE = {"micro_batch_size": 1, "steps": 4}
FP8 = {"precision": "fp8", "layout": {}, "tied": True, "options": ONE_SEQUENCE}
DELAYED = {**FP8, "recipe": "delayed", "options": {"micro_batch_size": 8, "steps": 6}}
GUARDED = {"steps": 10, "checkpoint_every": 4, "micro_batch_size": 1, "fallback_steps": 2}
FALLBACK = {**FP8, "samples": 160, "fault": "once", "options": {**GUARDED, "on_divergence": "auto"}}
SKIP = {"layout": {}, "samples": 160, "fault": "always", "options": {**GUARDED, "on_divergence": "skip"}}
PLAIN = {"layout": {}, "options": {"steps": 4}}


def recomputing(how):
    return {**PLAIN, "options": {**PLAIN["options"], "activation_checkpointing": how}}


@pytest.fixture(scope="module")
def one(start):
    return start(1, {"fp8": FP8, "delayed": DELAYED, "fallback": FALLBACK, "skip": SKIP, "plain": PLAIN})


@pytest.fixture(scope="module")
def two(start):
    tensor = {"tensor_parallel": 2}
    return start(
        2,
        {
            "fp8, shard": FP8, "fp8, tensor": {**FP8, "layout": tensor}, "delayed": DELAYED, "fallback": FALLBACK,
            "skip": SKIP, "plain": PLAIN, "selective": recomputing("selective"), "full": recomputing("full"),
        },
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard", "tensor"])
def test_fp8_trains_as_in_one_process(one, two, layout):
    found = two[f"fp8, {layout}"]
    assert found.values("loss") == pytest.approx(one["fp8"].values("loss"), rel=2e-3)
    assert found.values("loss") != pytest.approx(two["plain"].values("loss"), rel=1e-5)


@pytest.mark.slow
def test_delayed_scales_are_the_same_on_both_ranks_and_train_as_in_one_process(one, two):
    """Gradients are twice as large there until they are summed: in the first step, whose scale is 1, fewer vanish."""
    left, right = two["delayed"].scales
    assert left == right and len(left) == 2 * 7 * 3
    assert two["delayed"].values("loss") == pytest.approx(one["delayed"].values("loss"), rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_computed_again_is_the_same(two, how):
    assert two[how].history == two["plain"].history


@pytest.mark.slow
@pytest.mark.parametrize(("case", "tolerance"), [("fallback", 2e-3), ("skip", 1e-5)])
def test_every_rank_decides_as_one_process_and_goes_the_same_way(one, two, case, tolerance):
    (wanted,) = one[case].events
    assert [event["action"] for event in wanted] == ["rolled_back", "recovered"]
    assert two[case].events == [wanted, wanted]
    assert two[case].values("loss") == pytest.approx(one[case].values("loss"), rel=tolerance)
    assert [row["step"] for row in two[case].history] == list(range(1, 11))
