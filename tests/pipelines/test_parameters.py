"""Parameters: what is refused before a run, and what the steps get."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstrain.pipelines import parameters, spec


@pytest.fixture(scope="session")
def words(compiled: dict[str, Path]) -> spec.Pipeline:
    return spec.load(str(compiled["words"]))


@pytest.fixture(scope="session")
def crossing(compiled: dict[str, Path]) -> spec.Pipeline:
    return spec.load(str(compiled["crossing"]))


def collect(pipeline: spec.Pipeline, *settings: str, **file_values: Any) -> dict[str, Any]:
    return parameters.collect(pipeline, file_values, settings)


def complete(pipeline: spec.Pipeline, **given: Any) -> dict[str, Any]:
    return parameters.complete(pipeline, given, Path("/runs/one/state"))


def test_values_take_the_declared_types(words: spec.Pipeline) -> None:
    given = collect(words, "text=12", "count=12", "rate=1e-3", "flag=TRUE", "items=[3]", 'mapping={"c": null}')
    assert given == {"text": "12", "count": 12, "rate": 0.001, "flag": True, "items": [3], "mapping": {"c": None}}
    assert type(given["text"]) is str and type(given["count"]) is int and type(given["flag"]) is bool


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("txet=a", "unknown parameter 'txet'; did you mean 'text'?"),
        ("count=1.5", "count: expected integer, got '1.5'"),
        ("rate=nan", "rate: expected number, got 'nan'"),
        ("flag=1", "flag: expected true or false, got '1'"),
        ("items={}", "items: expected list, got '{}'"),
        ('mapping={"a": NaN}', "mapping: expected mapping"),
        ("text", "--set text: expected NAME=VALUE"),
        ("count.a=1", "count is integer, not a mapping, and has no 'a'"),
        ("mapping.a.b.c=1", "b is 1.0 already, not a mapping"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(words: spec.Pipeline, setting: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        collect(words, setting)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_values_are_checked_too(words: spec.Pipeline) -> None:
    assert collect(words, count=4.0, rate=1, text="1") == {"count": 4, "rate": 1.0, "text": "1"}
    assert collect(words, rate="1e-3") == {"rate": 0.001}  # YAML 1.1 reads 1e-3 as text
    for name, value in {"text": 5, "count": True, "rate": False, "flag": 1, "items": {}, "mapping": [1]}.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            collect(words, **{name: value})


def test_dotted_keys_reach_into_a_copy_and_settings_win(words: spec.Pipeline) -> None:
    given = collect(words, "mapping.a.c=1e-3", "mapping.a.d=text", "mapping.e=[1]", "mapping.a.c=2")
    assert given["mapping"] == {"a": {"b": 1, "c": 2, "d": "text"}, "e": [1]}
    assert words.parameters["mapping"].default == {"a": {"b": 1}}
    assert collect(words, "count=2", count=1) == {"count": 2}
    assert collect(words, "mapping.x=1", mapping={"y": 2}) == {"mapping": {"x": 1, "y": 2}}


def test_what_is_missing_is_named_with_its_meaning(words: spec.Pipeline, crossing: spec.Pipeline) -> None:
    with pytest.raises(ValueError, match=r"words: not given: text \(The words\.\)"):
        complete(words)
    with pytest.raises(ValueError, match=r"not given: corpus .*; model"):
        complete(crossing)


def test_defaults_are_filled_in_with_their_types(words: spec.Pipeline) -> None:
    values = complete(words, text="a")
    assert values["count"] == 3 and type(values["count"]) is int
    assert values["mapping"] == {"a": {"b": 1}}
    assert values["state"] == "/runs/one/state"
    assert complete(words, text="a", state="s3://b/state")["state"] == "s3://b/state"
    assert complete(words, text="a", state="")["state"] == ""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"import_dat": {}}, "config: no step of this pipeline is 'import_dat'; did you mean 'import_data'?"),
        ({"train_fp8": {"steps": 1}}, "config: no step of this pipeline is 'train_fp8'"),
        ({"import_data": 3}, "config.import_data: expected a mapping of option to value, found int"),
        ({"import_data": {"formt": "text"}}, "import_data: formt: unknown option; did you mean 'format'?"),
        ({"import_data": {"format": "xml"}}, "import_data: format: "),
        ({"merge": {"check_base": "perhaps"}}, "merge: check_base: "),
    ],
)
def test_every_steps_options_are_checked_before_the_run(
    crossing: spec.Pipeline, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        complete(crossing, corpus="c", model="m", config=config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parameter_is_checked_as_the_step_will(crossing: spec.Pipeline) -> None:
    with pytest.raises(ValueError, match="import_model: source: "):
        complete(crossing, corpus="c", model="")


def test_one_step_alone_takes_its_options_without_a_section(compiled: dict[str, Path]) -> None:
    importing = spec.load(str(compiled["importing"]))
    assert complete(importing, corpus="/c", config={"format": "text"})["config"] == {"format": "text"}
    assert complete(importing, corpus="/c", config={"import_data": {"format": "text"}})
    with pytest.raises(ValueError, match="unknown option"):
        complete(importing, corpus="/c", config={"fromat": "text"})


def test_local_paths_become_absolute_and_nothing_else(
    crossing: spec.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = complete(
        crossing, corpus="texts/a b", model="s3://bucket/model", config={"import_data": {"format": "text"}}
    )
    assert values["corpus"] == str(tmp_path / "texts/a b")
    assert values["model"] == "s3://bucket/model"
    assert values["config"] == {"import_data": {"format": "text"}}
    assert complete(crossing, corpus="~/c", model="m")["corpus"] == str(Path.home() / "c")


def test_what_does_not_fit_one_argument_is_refused(words: spec.Pipeline) -> None:
    with pytest.raises(ValueError, match="100000 bytes"):
        complete(words, text="a" * 100_000)


def test_the_tasks_of_a_pipeline_are_known_without_running_it(words: spec.Pipeline, crossing: spec.Pipeline) -> None:
    tasks = {task.name: task for task in words.tasks({"text": "a", "mode": "good"})}
    assert list(tasks) == ["make", "use", "use-2"]  # in an order in which they can run, branches included
    assert tasks["make"].title == "Make the words" and tasks["use-2"].title == "Never"
    assert tasks["make"].parameters == {"text": "a"} and tasks["make"].bindings == {"text": "text"}
    assert tasks["use"].outputs == {"metrics": "system.Metrics", "report": "system.HTML"}
    assert [task.component for task in crossing.tasks({})] == ["import_data", "import_model", "import_model", "merge"]


@pytest.mark.parametrize("text", ["a: [", "[]", "", "kind: Pipeline\nspec: {}", json.dumps({"root": {}})])
def test_what_is_no_compiled_pipeline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.yaml: not "):
        spec.parse(text.encode(), "x.yaml")


def test_a_component_of_ones_own_package_is_configured_like_ours(
    compiled: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaning = spec.load(str(compiled["cleaning"]))
    (ours, theirs) = cleaning.tasks({"corpus": "a", "config": {}})
    assert (ours.component, theirs.component) == ("import_data", "acme.steps.clean")
    options = {"acme.steps.clean": {"longest": 3}}
    given = collect(cleaning, corpus="s3://b/a", config=options)
    parameters.check_remote(cleaning, given)  # a machine that submits need not have the package
    with pytest.raises(ValueError, match=r"of component acme\.steps\.clean, which Python does not find here"):
        complete(cleaning, **given)
    folder = tmp_path / "acme" / "steps" / "clean"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "config.py").write_text(
        "from crosstrain.components.core.config import Config as Base, InputURI, OutputURI\n\n\n"
        'class Config(Base):\n    """Clean."""\n\n    corpus: InputURI\n    output: OutputURI\n    longest: int = 1\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert complete(cleaning, **given)["config"] == options
    with pytest.raises(ValueError, match=r"acme\.steps\.clean: lngest: unknown option"):
        complete(cleaning, corpus="s3://b/a", config={"acme.steps.clean": {"lngest": 3}})
    with pytest.raises(ValueError, match=r"no step of this pipeline is 'acme\.steps\.claen'"):
        complete(cleaning, corpus="s3://b/a", config={"acme.steps.claen": {"longest": 3}})
