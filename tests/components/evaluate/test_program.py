"""The whole step on small real models: verdicts, refusals, files, bytes."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute
from crosstrain.components.core.storage import open_store
from crosstrain.components.evaluate.config import Config
from crosstrain.components.evaluate.program import run

FILES = ["generations.jsonl", "metrics.json", "per_document.jsonl", "report.html"]
LOG = [
    {"step": n, "loss": 6.0 / n, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 64 * n}
    | ({"validation_loss": 6.5 / n} if n % 5 == 0 else {})
    for n in range(1, 21)
]
QUICK = {"resamples": 200, "generated_tokens": 6, "prompt_tokens": 4, "prompts": 2, "device": "cpu"}


@pytest.fixture
def shards(make_shards):
    return make_shards("shards")


@pytest.fixture
def evaluate(tmp_path, shards):
    """Run the step on artifacts, to `name`; the configuration may be added to."""

    def call(candidate, baseline, name="evaluation", **more):
        inputs = {key: value.uri for key, value in more.items() if isinstance(value, Artifact)}
        options = {key: value for key, value in more.items() if not isinstance(value, Artifact)}
        uris = {
            "candidate": candidate.uri,
            "baseline": baseline.uri,
            "data": shards.uri,
            "output": str(tmp_path / name),
        }
        return run(Config.decode({**QUICK, **uris, **inputs, **options}))

    return call


def louder(model):
    """Make a model surer of what it says, and so worse."""
    model.lm_head.weight *= 30


def test_a_full_evaluation_is_the_same_bytes_twice(evaluate, make_shards, make_model, make_adapter, shards, tmp_path):
    before = make_shards("before", seed=9)
    base = make_model("base", before, 0, log=LOG)
    tuned = make_model("tuned", shards, 1, precision="merged")
    adapter = make_adapter("adapter", base, shards, LOG[:7])
    results = [evaluate(tuned, base, name, forgetting=before, adapter=adapter, margin=9.0) for name in ("one", "two")]
    one, two = (result.artifact for result in results)
    assert [file.path for file in one.manifest.files] == FILES
    assert one.manifest.encode() == two.manifest.encode()
    assert set(one.manifest.inputs) == {"candidate", "baseline", "data", "forgetting", "adapter"}
    assert results[0].html == one.read("report.html").decode()
    facts = one.facts
    assert (facts.kind, facts.verdict, facts.unit, facts.device, facts.dtype) == (
        "evaluation", "pass", "document", "CPU", "float32",
    )  # fmt: skip
    assert not list((tmp_path / "one").glob(".crosstrain*"))


def test_the_metrics_are_the_sums_of_the_documents(evaluate, make_model, shards):
    result = evaluate(make_model("b", shards, 1), make_model("a", shards, 0))
    rows = [json.loads(line) for line in result.artifact.read("per_document.jsonl").splitlines()]
    tokens = np.array([row["tokens"] for row in rows])
    metrics = result.artifact.facts.metrics
    for name in ("baseline", "candidate"):
        losses = np.array([row[f"{name}_loss"] for row in rows])
        assert metrics[f"{name}_loss"] == pytest.approx((losses * tokens).sum() / tokens.sum())
        assert metrics[f"{name}_loss_low"] < metrics[f"{name}_loss"] < metrics[f"{name}_loss_high"]
        assert metrics[f"{name}_perplexity"] == pytest.approx(math.exp(metrics[f"{name}_loss"]))
    assert metrics["predicted_tokens"] == tokens.sum()
    assert metrics["documents"] == len(rows)
    assert len({row["document"] for row in rows}) == len(rows)
    assert result.metrics["improvement"] == metrics["improvement"]
    record = json.loads(result.artifact.read("metrics.json"))
    assert record["metrics"] == metrics and record["verdict"] == result.artifact.facts.verdict
    assert all(math.isfinite(value) for value in [*metrics.values(), *result.metrics.values()])


def test_bits_per_byte_are_of_the_predicted_text(evaluate, make_model, make_shards, tokenizer):
    documents = [np.append(tokenizer.encode_batch(["runs dög 語"])[0], tokenizer.eos_id)] * 24
    shards = make_shards("same", documents, length=documents[0].size)
    model = make_model("a", shards)
    metrics = evaluate(model, model, data=shards).artifact.facts.metrics
    first = len(tokenizer.decode(documents[0][:1]))
    text_bytes = len("runs dög 語".encode()) - first
    nats = metrics["baseline_loss"] * (documents[0].size - 1)
    assert metrics["baseline_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes)


def test_a_model_is_no_worse_than_itself(evaluate, make_model, shards):
    model = make_model("a", shards)
    result = evaluate(model, model)
    metrics = result.artifact.facts.metrics
    assert (metrics["improvement"], metrics["improvement_low"], metrics["passed"]) == (0.0, 0.0, 1.0)
    assert result.artifact.facts.finding == "identical"
    assert "is the same in every document: identical" in result.markdown


def test_a_worse_candidate_fails_and_the_step_only_when_asked(evaluate, make_model, shards, tmp_path):
    good, bad = make_model("good", shards), make_model("bad", shards, change=louder)
    result = evaluate(bad, good)
    facts = result.artifact.facts
    assert (facts.verdict, facts.finding, facts.metrics["passed"]) == ("fail", "significantly worse", 0.0)
    assert facts.metrics["improvement_high"] < 0
    assert evaluate(good, bad, "turned").artifact.facts.finding == "significantly better"
    loss = -facts.metrics["improvement_low"]
    assert evaluate(bad, good, "allowed", margin=loss).artifact.facts.verdict == "pass"
    with pytest.raises(ValueError, match=r"^verdict fail: .*report\.html$"):
        evaluate(bad, good, "required", require_pass=True)
    written = Artifact.open(str(tmp_path / "required"), "evaluation")
    assert written.facts.verdict == "fail"
    assert b"FAIL" in written.read("report.html")


def test_a_step_that_had_to_pass_fails_again_when_run_again(make_model, shards, tmp_path):
    good, bad = make_model("good", shards), make_model("bad", shards, change=louder)
    config = Config.decode(
        {**QUICK, "candidate": bad.uri, "baseline": good.uri, "data": shards.uri, "output": str(tmp_path / "e"),
         "require_pass": True}
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(ValueError, match="verdict fail"):
            execute("evaluate", config)


def test_forgetting_is_reported_and_judged_only_with_a_bound(evaluate, make_model, make_shards, shards, tmp_path):
    before = make_shards("before", seed=5)
    good, bad = make_model("good", shards), make_model("bad", shards, change=louder)
    reported = evaluate(bad, good, "reported", forgetting=before, margin=1e6).artifact.facts
    assert reported.verdict == "pass" and reported.metrics["forgetting_low"] > 0
    judged = evaluate(bad, good, "judged", forgetting=before, margin=1e6, max_forgetting=0.5).artifact.facts
    assert judged.verdict == "fail"
    told = Artifact.open(str(tmp_path / "judged")).read("report.html").decode()
    assert "Fails on the forgetting set. " in told
    enough = evaluate(bad, good, "enough", forgetting=before, margin=1e6, max_forgetting=1e6).artifact.facts
    assert enough.verdict == "pass"
    with pytest.raises(ValueError, match="max_forgetting judges the forgetting set"):
        evaluate(bad, good, max_forgetting=0.5)


def test_too_few_documents_are_said(evaluate, make_model, make_shards, shards, tokenizer):
    few = make_shards("few", [np.append(np.arange(100) + 1, tokenizer.eos_id)] * 12)
    result = evaluate(make_model("b", shards, 1), make_model("a", shards), data=few)
    assert result.artifact.facts.unit == "sample"
    assert "Only 12 documents, fewer than 20: samples were resampled instead." in result.html
    assert result.artifact.facts.metrics["documents"] == 12


def test_what_does_not_fit_is_refused_before_anything_runs(
    evaluate, make_model, make_shards, shards, tmp_path, other_tokenizer
):
    good = make_model("good", shards)
    foreign = make_shards("foreign", tokenizer=other_tokenizer)
    with pytest.raises(ValueError, match=r"the candidate model's tokenizer is .*ids mean different text"):
        evaluate(make_model("other", foreign), good)
    with pytest.raises(ValueError, match=r"foreign was made with"):
        evaluate(good, good, forgetting=foreign)
    short = make_model("short", shards, shape={"max_position_embeddings": 16})
    with pytest.raises(ValueError, match=r"the baseline model takes 16 tokens at most, and .* samples of 32"):
        evaluate(good, short)
    with pytest.raises(ValueError, match="at least two"):
        evaluate(good, good, max_documents=1, max_samples=1)
    with pytest.raises(ValueError, match="this is a shards artifact, and a model artifact is wanted"):
        evaluate(shards, good)
    assert not (tmp_path / "evaluation").exists()


def test_a_model_of_no_numbers_leaves_no_evaluation(evaluate, make_model, shards, tmp_path):
    def break_it(model):
        model.model.norm.weight[0] = float("nan")

    broken = make_model("broken", shards, change=break_it)
    with pytest.raises(ValueError, match=r"the candidate model at .*broken, on data: its loss is not a finite number"):
        evaluate(broken, make_model("good", shards))
    assert not list(Path(tmp_path / "evaluation").glob("*"))


def test_a_hopeless_model_has_no_infinite_metric(evaluate, make_model, shards):
    """Exp of the loss overflows: perplexity is left out, and the verdict stands."""
    bad = make_model("bad", shards, change=lambda model: model.lm_head.weight.mul_(1e5))
    result = evaluate(bad, make_model("good", shards))
    metrics = result.artifact.facts.metrics
    assert metrics["candidate_loss"] > 800 and "candidate_perplexity" not in metrics
    assert result.artifact.facts.verdict == "fail"


def test_a_log_that_is_none_is_refused(evaluate, make_model, shards):
    model = make_model("a", shards, log=[LOG[0], {"epoch": 1}])
    with pytest.raises(ValueError, match=r"training_log\.jsonl, line 2: not a JSON object with step and loss"):
        evaluate(model, model)


def texts_of(html):
    """Texts of each SVG in the page."""
    return [re.findall(r"<text[^>]*>([^<]*)</text>", svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_the_report_says_what_a_reader_needs(evaluate, make_shards, make_model, make_adapter, shards):
    before = make_shards("before", seed=9)
    base = make_model("base", before, 0, log=LOG)
    adapter = make_adapter("adapter", base, shards, LOG[:7])
    html = evaluate(make_model("tuned", shards, 1, precision="merged"), base, forgetting=before, adapter=adapter).html
    charts = texts_of(html)
    labels = [text for chart in charts for text in chart]
    assert len(charts) == 7
    assert labels.count("loss (nats/token)") == labels.count("optimizer step") == labels.count("unigram entropy") == 2
    assert labels.count("loss (nats/token), with 95% interval") == 2
    assert labels.count("improvement of one document (nats/token)") == labels.count("documents") == 2
    assert "Baseline, trained on the training split of the forgetting set." in html
    assert "Adapter, trained on the training split of the held-out data." in html
    assert "evaluated on CPU in float32" in html
    assert "fp8-torchao-emulated" in html and "they say nothing of FP8&#39;s speed" in html
    assert html.index('<div class="verdict') < html.index("Losses") < html.index("Generations") < html.index("Lineage")
    for artifact in (base, shards, before, adapter):
        assert artifact.manifest.sha256[:16] in html
    assert len(html.encode()) < 300_000


def test_text_of_documents_cannot_become_markup(evaluate, make_model, make_shards, tokenizer):
    attack = "</p><script>alert(1)</script>&lt;"
    documents = [np.append(tokenizer.encode_batch([attack])[0], tokenizer.eos_id)] * 24
    shards = make_shards("attack", documents, length=2 * documents[0].size)
    model = make_model("a", shards, shape={"max_position_embeddings": 256})
    result = evaluate(model, model, data=shards, prompt_tokens=999, generated_tokens=8)
    assert "<script" not in result.html
    result = evaluate(model, model, "shorter", data=shards, prompt_tokens=20)
    assert "&lt;/p&gt;&lt;script&gt;" in result.html
    first = json.loads(result.artifact.read("generations.jsonl").splitlines()[0])
    assert attack.startswith(first["prompt"]) and len(first["prompt"]) > 10


def test_the_summary_is_markdown_without_html(evaluate, make_model, shards):
    text = evaluate(make_model("b", shards, 1), make_model("a", shards)).markdown
    assert text.startswith("## Verdict: ")
    assert "| Baseline |" in text and "| Unigram entropy |" in text
    assert "[report.html](report.html)" in text
    assert not re.search(r"<\w|https?:|/tmp", text)


def test_cuda_is_refused_where_there_is_none(evaluate, make_model, shards):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = make_model("a", shards)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        evaluate(model, model, device="cuda")


def test_inputs_and_output_in_object_storage_give_the_same_artifact(make_model, shards, tmp_path, s3_uri):
    """Everything over S3: the manifest, and so every byte, is that of a run in local folders."""
    models = {"candidate": make_model("tuned", shards, 1, log=LOG), "baseline": make_model("base", shards)}
    local = {**{name: model.uri for name, model in models.items()}, "data": shards.uri, "output": str(tmp_path / "out")}
    remote = {name: f"{s3_uri}/{name}" for name in local}
    for name, uri in local.items():
        for path in sorted(Path(uri).rglob("*")):
            if path.is_file():
                open_store(remote[name]).upload(path, path.relative_to(uri).as_posix())
    one, two = (run(Config.decode({**QUICK, **uris})).artifact for uris in (local, remote))
    assert two.uri.startswith("s3://")
    assert one.manifest.sha256 == two.manifest.sha256
    assert Artifact.open(two.uri).read("report.html") == one.read("report.html")
