"""Two arms compared: the verdict from the table alone, what cannot be compared, and no figure that was not measured."""

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import AdapterFacts, ModelFacts, Source
from crosstrain.components.core.report import MAX_BYTES
from crosstrain.components.core.step import RECORD_NAME, Result, execute, load_config

DATA = {"shards": Source(kind="shards", sha256="a" * 64)}
OPTIONS = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 8, "evaluate_batches": 8, "learning_rate": 0.001}
CONTROL, FP8 = [5.0, 5.1, 4.9], [5.01, 5.115, 4.905]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """Write what a training run leaves; its URI."""

    def write(
        label: str,
        seed: int,
        loss: float | None,
        *,
        place: str = "",
        inputs: dict[str, Source] = DATA,
        numerics: dict[str, float] | None = None,
        record: dict[str, float] | None = None,
        platform: str = "Linux",
        **options: Any,
    ) -> str:
        uri = str(tmp_path / f"{place}{label}-{seed}")
        values = {**OPTIONS, "precision": label.partition("-")[0], "seed": seed, **options}
        rows: list[dict[str, Any]] = [{"step": step, "loss": 6.0 - step / 10, **(numerics or {})} for step in (1, 2, 3)]
        if loss is not None:
            rows[-1]["validation_loss"] = loss
        shared = {"steps": 3, "tokens_seen": 3000, "train_loss": 5.7}
        facts: ModelFacts | AdapterFacts = ModelFacts(
            architecture="LlamaForCausalLM", parameters=1000, dtype="float32", vocab_size=300, max_sequence_length=64,
            tied_embeddings=True, tokenizer_sha256=None, precision=label, **shared,
        )  # fmt: skip
        if label == "lora":
            facts = AdapterFacts(
                method="lora", rank=4, alpha=8, target_modules=("q_proj",), trainable_parameters=10,
                base_parameters=1000, base_sha256="b" * 64, **shared,
            )  # fmt: skip
        with ArtifactWriter(uri) as out:
            with out.create("training_log.jsonl") as path:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            artifact = out.commit("train_fp8", facts, values, inputs)
        if record is not None:
            artifact.store.write(RECORD_NAME, json.dumps({"metrics": record, "platform": platform}).encode())
        return uri

    return write


@pytest.fixture
def arms(make: Callable[..., str]) -> Callable[..., dict[str, list[str]]]:
    """Both arms, a seed a loss."""

    def write(
        control: list[float] = CONTROL, candidate: list[float] = FP8, label: str = "fp8-torchao-emulated", **more: Any
    ) -> dict[str, list[str]]:
        return {
            "control": [make("bf16", seed, loss, **more) for seed, loss in enumerate(control)],
            "candidate": [make(label, seed, loss, **more) for seed, loss in enumerate(candidate)],
        }

    return write


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Result]:
    def run(name: str = "comparison", **values: Any) -> Result:
        return execute("compare_arms", load_config("compare_arms").decode({"output": str(tmp_path / name), **values}))

    return run


class Tables(HTMLParser):
    """The cells of a page's tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.tables[-1][-1][-1] += data

    def of(self, first: str) -> list[list[str]]:
        return next(table[1:] for table in self.tables if table[0][0] == first)


@pytest.mark.parametrize(
    ("candidate", "margin", "verdict"),
    [
        (FP8, 1.0, "equivalent"),
        (FP8, 0.25, "undecided"),
        ([5.2, 5.31, 5.09], 1.0, "different"),
        ([4.8, 4.89, 4.71], 1.0, "different"),
        ([5.0, 5.3, 4.7], 1.0, "undecided"),
    ],
)
def test_a_reader_can_compute_the_verdict_again_from_the_table(arms, compare, candidate, margin, verdict):
    result = compare(**arms(candidate=candidate), margin_percent=margin)
    tables = Tables(result.html)
    *rows, mean = tables.of("Seed")
    assert [row[0] for row in rows] == ["0", "1", "2"] and mean[0] == "Mean"
    control, fp8 = ([float(row[column]) for row in rows] for column in (1, 2))
    percent = [100 * (b - a) / a for a, b in zip(control, fp8, strict=True)]
    half = student.ppf(0.975, len(rows) - 1) * stdev(percent) / math.sqrt(len(rows))
    low, high = fmean(percent) - half, fmean(percent) + half
    again = "equivalent" if -margin <= low and high <= margin else "undecided"
    again = "different" if low > margin or high < -margin else again
    assert again == verdict == result.artifact.facts.verdict
    assert re.search(r'class="verdict \w+"><strong>(\w+)', result.html).group(1) == verdict.upper()
    ((count, *numbers, shown),) = tables.of("Seeds")
    expected = [fmean(percent), stdev(percent), student.ppf(0.975, 2), low, high]
    assert count == "3" and numbers == [f"{number:.4f}" for number in expected] and float(shown) == margin
    assert f"interval {low:+.3f}% to {high:+.3f}%" in result.html and f"{low:+.3f}%" in result.markdown
    for row, a, b, gap in zip(rows, control, fp8, percent, strict=True):
        assert row[3:] == [f"{b - a:+.6f}", f"{gap:+.4f}", f"{math.exp(a):.3f}", f"{math.exp(b):.3f}"]
    assert result.metrics["gap_percent_low"] == pytest.approx(low)
    record = json.loads(result.artifact.read("comparison.json"))
    assert [one["candidate_loss"] for one in record["seeds"]] == candidate


def test_the_order_in_which_runs_arrive_does_not_matter(arms, compare):
    given = arms()
    shuffled = {"control": given["control"][::-1], "candidate": given["candidate"][1:] + given["candidate"][:1]}
    first, second = compare(**given), compare("other", **shuffled)
    assert first.html == second.html
    assert first.artifact.read("comparison.json") == second.artifact.read("comparison.json")


def test_emulated_fp8_shows_numerics_only_and_says_so(arms, compare):
    record = {"tokens_per_second": 100.0, "peak_rss_bytes": 1e9}
    result = compare(**arms(record=record), instance_type="ml.p5.48xlarge")
    assert "FP8 was emulated" in result.html and "FP8 was emulated" in result.markdown
    assert not [name for name in result.metrics if "speed" in name or "cost" in name]
    assert "Tokens a second" not in result.html and result.html.count("not measured") == 1
    assert "+13% at 1B, +18% at 7B" in result.html and "+3% at 1B, +2% at 7B" in result.markdown
    assert len(result.html) < MAX_BYTES and "http" not in result.html.replace("http://www.w3.org", "")


def test_what_was_measured_is_told_of_real_fp8(make, compare, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("prices: {my.box: {usd_per_hour: 36, source: us, date: 2026-01-01}}")
    slow, fast = (
        {"tokens_per_second": rate, "peak_rss_bytes": peak} for rate, peak in ((100.0, 2**30), (120.0, 2**29))
    )
    given = {
        "control": [make("bf16", s, 5.0 + s, record=slow) for s in (0, 1)],
        "candidate": [make("fp8-te", s, 5.0 + s, record={**fast, "tokens_per_second": 120.0 + 2 * s}) for s in (0, 1)],
    }
    result = compare(**given, instance_type="my.box", prices=str(prices))
    assert result.metrics["speed_up_percent"] == pytest.approx(21)
    assert result.metrics["control_cost_usd"] == pytest.approx(3000 / 100 * 36 / 3600)
    rows = {row[0]: row[1:] for row in Tables(result.html).of("")}
    assert rows["Peak memory of the process, MiB"] == ["1,024", "512", "-50.0%"]
    assert rows["Tokens a second"] == ["100", "121", "+21.0%"]
    assert rows["Cost of a run, USD"][0] == "0.3000" and "+21.0% (+8.3% to +33.7%)" in result.html
    assert "emulated" not in result.html and "36 USD/h" in result.html


def test_speed_is_not_compared_over_different_platforms(make, compare):
    record = {"tokens_per_second": 100.0, "peak_rss_bytes": 1.0}
    result = compare(
        control=[make("bf16", s, 5.0, record=record) for s in (0, 1)],
        candidate=[make("fp8-te", s, 5.0, record=record, platform="Darwin") for s in (0, 1)],
    )
    assert "speed_up_percent" not in result.metrics and "nothing is compared" in result.html


def test_the_artifact_does_not_depend_on_how_fast_the_runs_were(arms, compare):
    first = compare(**arms(label="fp8-te", record={"tokens_per_second": 100.0, "peak_rss_bytes": 1.0}))
    second = compare("b", **arms(label="fp8-te", place="b", record={"tokens_per_second": 5.0, "peak_rss_bytes": 2.0}))
    assert first.artifact.manifest.sha256 == second.artifact.manifest.sha256


def test_equal_losses_of_models_that_learned_nothing_are_called_that(arms, compare):
    assert "has not learned" in compare(**arms(record={"unigram_entropy": 4.5})).html
    learned = compare("b", **arms(place="b", record={"unigram_entropy": 5.5}))
    assert "has not learned" not in learned.html and learned.metrics["learned"] == 1


def test_what_fp8_does_to_the_numbers_is_shown_where_the_logs_tell(arms, make, compare):
    assert "What FP8 did" not in compare(**arms()).html
    given = {
        "control": [make("bf16", s, 5.0, place="n") for s in (0, 1)],
        "candidate": [make("fp8-e-emulated", s, 5.0, numerics={"fp8_input_amax": 3.5 + s}) for s in (0, 1)],
    }
    assert ["input amax", "4.5"] in Tables(compare("n", **given).html).of("Tensor and figure")


def test_lora_is_compared_with_full_fine_tuning(make, compare):
    record = {"tokens_per_second": 100.0, "peak_rss_bytes": 1.0}
    inputs = {**DATA, "model": Source(kind="model", sha256="c" * 64)}
    result = compare(
        control=[make("full", s, 5.0, inputs=inputs, record=record) for s in (0, 1)],
        candidate=[make("lora", s, 5.0, inputs=inputs, record=record, learning_rate=0.1, rank=4) for s in (0, 1)],
        study="lora",
    )
    assert result.artifact.facts.candidate == "lora" and "up to -70%" in result.html
    assert ["Candidate", "lora", "10", "0"] in Tables(result.html).of("Arm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": lambda make: [make("fp8", s, 5.0) for s in (0, 3)]}, "seed 1: only one of the two arms"),
        ({"candidate": lambda make: [make("fp8", 0, 5.0), make("fp8", 0, 5.0, place="x")]}, "in its arm twice"),
        ({"candidate": lambda make: [make("fp8", 0, 5.0)], "control": lambda make: [make("bf16", 0, 5.0)]}, "one seed"),
        ({"candidate": lambda make: [make("fp8", 0, 5.0), make("fp8", 1, None)]}, "no held-out loss"),
        ({"candidate": lambda make: [make("fp8", s, 5.0, learning_rate=1.0) for s in (0, 1)]}, "learning_rate"),
        ({"candidate": lambda make: [make("fp8", s, 5.0, learning_rate=s + 1.0) for s in (0, 1)]}, "learning_rate"),
        ({"candidate": lambda make: [make("fp8", 0, 5.0), make("fp8-te", 1, 5.0)]}, "ran as fp8-te"),
        (
            {"candidate": lambda make: [make("fp8", s, 5.0, inputs={"shards": Source(kind="shards", sha256="b" * 64)})
                                        for s in (0, 1)]},
            "other data",
        ),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(make, compare, tmp_path, change, message):
    default = {"control": lambda make: [make("bf16", s, 5.0) for s in (0, 1)]}
    with pytest.raises(ValueError, match=message):
        compare(**{name: uris(make) for name, uris in {**default, **change}.items()})
    assert not (tmp_path / "comparison").exists()


def test_an_artifact_without_a_training_log_is_refused(make, compare, tmp_path):
    with ArtifactWriter(str(tmp_path / "bare")) as out:
        facts = Artifact.open(make("bf16", 9, 5.0)).facts
        out.commit("import_model", facts, {"seed": 0}, {})
    with pytest.raises(ValueError, match=re.escape("has no training_log.jsonl")):
        compare(control=[str(tmp_path / "bare")], candidate=[make("fp8", 0, 5.0)])
