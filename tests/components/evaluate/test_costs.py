"""What making the models cost: on the page that KFP shows, never in the bytes of the artifact."""

import json

import pytest

from crosstrain.components.core.step import RECORD_NAME
from crosstrain.components.evaluate.config import Config
from crosstrain.components.evaluate.costs import UNKNOWN
from crosstrain.components.evaluate.program import run

METRICS = {
    "queue_seconds": 600.0, "run_seconds": 7_200.0, "restart_seconds": 120.0, "cost_usd": 223.55,
    "cost_usd_per_million_tokens": 1.5,
}  # fmt: skip
BASIS = "2 x ml.p5.48xlarge at 55.04 USD/h, a contract, 2026-12-01"


@pytest.fixture
def evaluated(make_model, make_shards, tmp_path):
    """A function that records how the baseline was made, evaluates, and gives page, summary and stored page."""
    shards = make_shards("shards")
    base, tuned = make_model("base", shards, 0), make_model("tuned", shards, 1)

    def call(**record: object) -> tuple[str, str, str]:
        values = {"component": "train_fp8", "seconds": 12.0, "metrics": {}, **record}
        base.store.write(RECORD_NAME, json.dumps(values).encode())
        uris = {"candidate": tuned.uri, "baseline": base.uri, "data": shards.uri, "output": str(tmp_path / "e")}
        result = run(Config.decode({"resamples": 200, "prompts": 0, "device": "cpu", **uris}))
        return result.html, result.markdown, result.artifact.store.read("report.html").decode()

    return call


def test_a_jobs_cost_is_told_part_by_part(evaluated):
    html, markdown, stored = evaluated(metrics=METRICS, job={"cost": BASIS})
    for text in ("baseline (train_fp8)", "600 s", "7,200 s", "120 s", "223.55", "1.50", BASIS):
        assert text in html and text in markdown, text
    assert html.index("Cost") < html.index("Lineage")
    assert "Cost" not in stored and "223.55" not in stored, "the artifact's bytes are those of the work"


def test_without_an_instance_type_there_is_no_amount_and_a_reason(evaluated):
    html, markdown, _ = evaluated()
    assert UNKNOWN in html and UNKNOWN in markdown and "12 s" in html
    assert "| baseline (train_fp8) | – | 12 s | – | – | – | – |" in markdown


def test_a_model_of_unknown_making_has_no_cost_section(make_model, make_shards, tmp_path):
    shards = make_shards("shards")
    base, tuned = make_model("base", shards, 0), make_model("tuned", shards, 1)
    uris = {"candidate": tuned.uri, "baseline": base.uri, "data": shards.uri, "output": str(tmp_path / "e")}
    result = run(Config.decode({"resamples": 200, "prompts": 0, "device": "cpu", **uris}))
    assert "<h2>Cost" not in result.html and "**Cost**" not in result.markdown
