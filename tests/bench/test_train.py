"""The training bench's own logic: equal work in every arm, turns, ratios, and what makes it fail."""

import json

import numpy as np
import pytest

from bench import looping, train

WORK = looping.Work(
    steps=6, preset="debug", vocabulary=64, length=16, global_batch=4, micro_batch=2, checkpoint_every=2
)


def said(**given):
    return {
        "losses": [3.0, 2.0], "step_seconds": [1.0, 2.0, 3.0], "step_cpu_seconds": [1.0], "peak_bytes": 7,
        "precision": "x", "stalls": [], **given,
    }  # fmt: skip


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_arm_does_the_same_work():
    bare, ours, trainer = (looping.run(arm, WORK) for arm in ("bare", "ours", "trainer"))
    assert len(ours["losses"]) == 6 and bare["losses"] == ours["losses"] and bare["norms"] == ours["norms"]
    assert train.distance(trainer, ours) < train.TRAINER_TOLERANCE
    assert len(set(ours["losses"])) == 6, "losses that do not move would be equal of any work"
    assert len(ours["stalls"]) == 3 and ours["precision"] == "fp32"
    for said in (bare, ours):
        assert len(said["step_seconds"]) == len(said["step_cpu_seconds"]) == 6 - 1 - looping.WARM_UP


def test_a_step_lasts_from_its_first_sample_to_the_first_of_the_next():
    data = looping.Clocked(WORK.samples(), [5, 3, 4, 0])
    assert np.array_equal(data[1].input_ids, WORK.samples()[3].input_ids)
    data.asked = [(0.0, 0.0), (0.5, 0.1), (3.0, 1.0), (3.5, 1.1), (4.0, 1.5)]
    assert data.steps(2) == ([3.0, 1.0], [1.0, 0.5])


def test_arms_take_turns_at_being_first():
    ran = []
    found = train.interleave(["a", "b", "c"], 2, lambda arm: ran.append(arm) or {"number": len(ran)})
    assert ran == ["a", "b", "c", "b", "c", "a"]
    assert found["a"] == [{"number": 1}, {"number": 6}]


def test_a_ratio_pairs_medians_of_the_same_round():
    ours = [said(step_seconds=[2.0, 2.0, 90.0], step_cpu_seconds=[3.0]), said(step_seconds=[8.0])]
    bare = [said(step_seconds=[1.0]), said(step_seconds=[8.0])]
    assert train.spread(ours, bare) == {"ratio": 1.5, "ratio_range": [1.0, 2.0], "ratio_cpu": 2.0}


def test_the_loop_part_says_overhead_and_speedup(capsys):
    steps = {"bare": 1.0, "ours": 1.02, "trainer": 1.53}
    train.bench_loop({}, 2, 102, lambda name, work: said(step_seconds=[steps[name]]))
    *arms, overhead, trainer = lines(capsys)
    assert [line["arm"] for line in arms] == ["bare", "ours", "trainer"]
    assert arms[1]["tokens_per_second"] == 100 and arms[2]["ours_over_it"]["ratio"] == pytest.approx(2 / 3, rel=1e-4)
    assert overhead["overhead_percent"] == 2 and overhead["passed"]
    assert trainer["speedup"] == 1.5 and trainer["passed"]
    steps["bare"], steps["trainer"] = 0.98, 1.0
    train.bench_loop({}, 1, 102, lambda name, work: said(step_seconds=[steps[name]]))
    assert [line["passed"] for line in lines(capsys)[-2:]] == [False, False]


@pytest.mark.parametrize(("arm", "losses"), [("bare", [3.0, 2.0000001]), ("trainer", [3.0, 2.01])])
def test_an_arm_that_did_other_work_fails_the_bench(arm, losses):
    with pytest.raises(AssertionError, match="did different work"):
        train.bench_loop({}, 1, 1, lambda name, work: said(losses=losses) if name == arm else said())


def test_the_time_of_emulated_fp8_is_called_the_emulations(capsys):
    losses = {"fp32": [2.0], "bf16": [2.1], "fp8": [2.2]}
    train.bench_precision({}, 1, 1, lambda name, work: said(losses=losses[work["precision"]]))
    fp32, bf16, fp8, delayed = lines(capsys)
    assert "cost" in fp32 and "cost" in bf16 and not fp32["emulated"]
    for line in (fp8, delayed):
        assert line["emulated"] and "cost" not in line and line["emulation"]["ratio"] == 1
    assert fp8["loss_gap_percent_of_fp32"] == pytest.approx(10) and "loss_gap_percent_of_fp32" not in fp32


def test_a_stall_is_a_share_of_the_steps_between_checkpoints(capsys):
    seconds = [0.1] * 116  # steps 4 to 119 of 120
    seconds[50 - 4] = seconds[100 - 4] = 0.3  # the steps that checkpoints followed
    seen = []

    def arm(name, work):
        seen.append((name, work["steps"], work["checkpoint_every"]))
        return said(step_seconds=seconds, stalls=[0.1, 0.2, 9.0])

    train.bench_checkpoint({}, 1, 1, arm)
    (line,) = lines(capsys)
    assert seen == [("ours", 120, 50)]
    assert line["stall_share"] == pytest.approx(0.15 / 5) and line["passed"], "the last save is no stall"
    assert line["slowdown_share"] == pytest.approx(0.2 / 5)


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["--only", "loops"])
    assert "choose among loop, precision, checkpoint" in capsys.readouterr().err
