"""What the KFP UI makes of a pipeline: its form, its graph, run compare, and the pages that a step shows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import dsl

from crosstrain.components.core import step
from crosstrain.components.core.config import SOURCE
from crosstrain.components.core.step import DATA_SUFFIX, Result, execute, load_config, run_step
from crosstrain.pipelines import spec
from crosstrain.pipelines.parameters import MAX_BYTES

FORM = {
    "STRING": lambda value: isinstance(value, str),
    "NUMBER_INTEGER": lambda value: isinstance(value, int | float) and float(value).is_integer(),
    "NUMBER_DOUBLE": lambda value: isinstance(value, int | float),
    "BOOLEAN": lambda value: isinstance(value, bool),
    "LIST": lambda value: isinstance(value, list),
    "STRUCT": lambda value: isinstance(value, dict),
}
"""Types that the form of a new run has a field for, and whether a default fits the field."""
PIPELINES = spec.committed()


def definitions(pipeline: spec.Pipeline) -> dict[str, Any]:
    """The parameters as they stand in the YAML, which is what the UI reads."""
    found: dict[str, Any] = pipeline.document["root"].get("inputDefinitions", {}).get("parameters", {})
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_every_parameter_has_a_description_a_default_and_a_field_in_the_form(name: str) -> None:
    pipeline = spec.load(name)
    for parameter, definition in definitions(pipeline).items():
        assert definition.get("description", "").strip(), f"{parameter}: no description"
        fits = FORM.get(definition["parameterType"])
        assert fits is not None, f"{parameter}: the form has no field for {definition['parameterType']}"
        if "defaultValue" in definition:
            assert fits(definition["defaultValue"]), f"{parameter}: the default {definition['defaultValue']!r}"


@pytest.mark.parametrize("name", PIPELINES)
def test_only_the_place_of_a_users_own_data_has_no_default(name: str) -> None:
    pipeline = spec.load(name)
    places = {
        task.bindings[field]
        for task in pipeline.tasks({item.name: item.default for item in pipeline.parameters.values()})
        if task.component
        for field in load_config(task.component).uris(SOURCE)
        if field in task.bindings
    }
    assert {item.name for item in pipeline.parameters.values() if item.required} <= places


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_explains_itself_and_each_step_has_a_name_of_its_own(name: str) -> None:
    pipeline = spec.load(name)
    assert pipeline.document["pipelineInfo"].get("description"), "the UI shows this on the pipeline's page"
    shown = []
    for component in [pipeline.document["root"], *pipeline.document["components"].values()]:
        for key, task in component.get("dag", {}).get("tasks", {}).items():
            if "dag" not in pipeline.document["components"][task["componentRef"]["name"]]:
                title = task["taskInfo"]["name"]
                assert title != key and title[0].isupper() and "_" not in title, f"{key}: no display name"
                shown.append(title)
    assert len(set(shown)) == len(shown), "two steps of one name"


@pytest.mark.parametrize("name", PIPELINES)
def test_a_compiled_pipeline_uploads_as_it_is(name: str) -> None:
    """One document of IR, no platform part, far below the 32 MiB that the server takes and the 1 MiB of etcd."""
    pipeline = spec.load(name)
    assert pipeline.data.count(b"\n---\n") == 0
    assert len(pipeline.data) < 500_000 and MAX_BYTES < 128 * 1024
    assert pipeline.document["schemaVersion"].startswith("2.")
    for executor in pipeline.document["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"]), "a step installs packages when it runs"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What KFP's own artifacts hold after a step whose program measured, among others, no number."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": "a word"}\n')
    config = load_config("import_data").decode(
        {"source": str(tmp_path / "text"), "output": str(tmp_path / "out" / ("corpus" + DATA_SUFFIX))}, "test"
    )
    made = execute("import_data", config).artifact
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "steps": 3, "validation_loss": 1.5}
    markdown = "## Verdict: pass\n\n[report.html](report.html) [elsewhere](https://example.com/x)\n"
    result = Result(made, metrics, "<!doctype html><p>report</p>", markdown)
    monkeypatch.setattr(step, "execute", lambda component, config: result)
    outputs = {
        "output": dsl.Dataset("corpus", str(tmp_path / "out" / "corpus")),
        "metrics": dsl.Metrics("metrics", str(tmp_path / "out" / "metrics")),
        "html": dsl.HTML("report", str(tmp_path / "out" / "report")),
        "markdown": dsl.Markdown("summary", str(tmp_path / "out" / "summary")),
    }
    taken = dsl.Dataset("corpus", "s3://bucket/a folder/corpus")
    run_step("tokenize", inputs={"corpus": taken}, config={"vocab_size": 300}, **outputs)
    return SimpleNamespace(**outputs, made=made)


def test_a_metric_that_is_no_number_keeps_the_others_in_run_compare(shown: SimpleNamespace) -> None:
    assert shown.metrics.metadata == {"steps": 3.0, "validation_loss": 1.5}
    json.dumps(shown.metrics.metadata, allow_nan=False)


def test_the_summary_links_to_the_artifacts(shown: SimpleNamespace) -> None:
    lines = Path(shown.markdown.path).read_text().splitlines()
    uri = shown.made.uri
    assert f"[report.html]({uri}/report.html) [elsewhere](https://example.com/x)" in lines
    assert "- corpus: [s3://bucket/a folder/corpus.data](s3://bucket/a%20folder/corpus.data)" in lines
    assert f"- output: [{uri}]({uri})" in lines
    assert shown.output.metadata["manifest"] == f"{uri}/manifest.json"
    assert Path(shown.html.path).read_text() == "<!doctype html><p>report</p>"
