"""Costs are sums that can be done by hand, or a reason; prices come from files that say where they are from."""

from datetime import date
from pathlib import Path

import pytest

from crosstrain.components.core.cost import Cost, Price, Timing, Unpriced, load_prices, step_cost

PRICES = {"x.large": Price(usd_per_hour=36.0, source="a contract", date=date(2026, 5, 1), terms="reserved")}
TIMING = Timing(wall_seconds=1000, queue_seconds=500, compile_seconds=200, restart_seconds=100)


def priced(tokens: int = 0, nodes: int = 2) -> Cost:
    cost = step_cost("x.large", nodes, TIMING, tokens, PRICES)
    assert isinstance(cost, Cost)
    return cost


def test_the_cost_is_wall_time_times_nodes_times_price() -> None:
    cost = priced()  # 36 USD/h is one cent a second and node
    assert cost.usd == pytest.approx(20.0)
    assert (cost.work_usd, cost.compile_usd, cost.restart_usd) == pytest.approx((14.0, 4.0, 2.0))
    assert cost.node_hours == pytest.approx(2000 / 3600)


def test_the_queue_is_told_but_costs_nothing() -> None:
    longer = TIMING.model_copy(update={"queue_seconds": 90_000.0})
    cost = step_cost("x.large", 2, longer, 0, PRICES)
    assert isinstance(cost, Cost)
    assert cost.usd == priced().usd and cost.queue_seconds == 90_000


def test_cost_per_million_tokens_is_of_the_total() -> None:
    assert priced(tokens=4_000_000).usd_per_million_tokens == pytest.approx(5.0)
    assert priced().usd_per_million_tokens is None
    assert "cost_usd_per_million_tokens" not in priced().metrics()


def test_an_unknown_instance_type_gives_no_number() -> None:
    for name, said in (("y.large", "no price for y.large"), ("", "not known")):
        cost = step_cost(name, 2, TIMING, 1000, PRICES)
        assert isinstance(cost, Unpriced) and said in cost.reason
        assert not [metric for metric in cost.metrics() if "usd" in metric]


def test_no_price_of_sagemaker_is_guessed_from_that_of_ec2() -> None:
    assert isinstance(step_cost("p5.48xlarge", 1, TIMING), Cost)
    assert isinstance(step_cost("ml.p5.48xlarge", 1, TIMING), Unpriced)


def test_every_packaged_price_names_source_and_day() -> None:
    prices = load_prices()
    assert prices
    for price in prices.values():
        assert price.source and price.region and price.terms and price.date <= date.today()


def test_a_report_repeats_what_the_figure_rests_on() -> None:
    assert priced().provenance() == "2 x x.large at 36 USD/h (reserved), a contract, 2026-05-01"


def test_a_file_of_the_user_adds_and_replaces(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "prices:\n"
        "  ml.p5.48xlarge: {usd_per_hour: 63.3, source: invoice, date: 2026-10-01}\n"
        "  p5.48xlarge: {usd_per_hour: 30, source: contract, date: 2026-10-01}\n"
    )
    prices = load_prices(own)
    assert prices["ml.p5.48xlarge"].usd_per_hour == 63.3
    assert prices["p5.48xlarge"].source == "contract"
    assert "trn1.32xlarge" in prices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prices: {x: {usd_per_hour: -1, source: s, date: 2026-01-01}}", "prices.x.usd_per_hour"),
        ("prices: {x: {usd_per_hour: 1, date: 2026-01-01}}", "prices.x.source: required"),
        ("prices: {x: {usd_per_hour: 1, source: s}}", "prices.x.date: required"),
        ("currency: EUR\nprices: {}", "currency"),
        ("- a", "expected a mapping"),
        ("prices: {", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        load_prices(own)
    assert str(own) in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such price file"):
        load_prices(tmp_path / "none.yaml")


def test_times_and_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="more than wall_seconds"):
        Timing.decode({"wall_seconds": 10, "compile_seconds": 8, "restart_seconds": 4})
    with pytest.raises(ValueError, match="nodes"):
        step_cost("x.large", 0, TIMING, 0, PRICES)
