"""What a job cost: its wall time by its instance type's price, and for the tokens that it trained on itself."""

import pytest

from crosstrain.components.core.cost import Cost, Unpriced
from crosstrain.components.core.launch.job import JobResult, RunOn
from crosstrain.components.core.launch.run_job import job_cost

PRICE = {"usd_per_hour": 36.0, "source": "a contract", "date": "2026-12-01"}
RUN_ON = RunOn.decode({"target": "trainjob", "instance_type": "own.large", "prices": {"own.large": PRICE}})


def result(instance_type: str = "own.large", restarts: int = 0) -> JobResult:
    return JobResult(
        name="n", target="trainjob", state="succeeded", nodes=2, instance_type=instance_type,
        seconds_queued=500, seconds_running=900, seconds_restarting=100, restarts=restarts,
    )  # fmt: skip


def test_queue_compile_and_restart_are_told_apart():
    cost = job_cost(RUN_ON, result(restarts=1), {"compile_seconds": 90, "tokens_seen": 2_000_000})
    assert isinstance(cost, Cost)
    assert (cost.usd, cost.restart_usd, cost.compile_usd) == pytest.approx((20.0, 2.0, 1.8))
    assert cost.queue_seconds == 500 and cost.usd_per_million_tokens == pytest.approx(10.0)


def test_tokens_of_an_earlier_job_are_not_this_ones():
    seen = {"tokens_seen": 2_000_000, "tokens_resumed": 1_000_000}
    resumed, restarted = (job_cost(RUN_ON, result(restarts=number), seen) for number in (0, 1))
    assert isinstance(resumed, Cost) and resumed.usd_per_million_tokens == pytest.approx(20.0)
    assert isinstance(restarted, Cost) and restarted.usd_per_million_tokens == pytest.approx(10.0)


def test_compiling_is_never_longer_than_the_run():
    cost = job_cost(RUN_ON, result(), {"compile_seconds": 5_000})
    assert isinstance(cost, Cost) and cost.compile_usd == pytest.approx(18.0)


def test_an_instance_type_without_a_price_has_a_reason():
    cost = job_cost(RunOn(), result("ml.p5.48xlarge"), {})
    assert isinstance(cost, Unpriced) and "no price for ml.p5.48xlarge" in cost.reason


def test_a_price_of_ones_own_wins_over_the_packaged_one():
    own = RunOn.decode({"target": "trainjob", "instance_type": "p5.48xlarge", "prices": {"p5.48xlarge": PRICE}})
    cost = job_cost(own, result("p5.48xlarge"), {})
    assert isinstance(cost, Cost) and cost.price.source == "a contract"
