"""Running a component: once, from what it was given, with options that are told apart."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosstrain.components.core import telemetry
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import finite
from crosstrain.components.core.step import DATA_SUFFIX, Result, execute, load_config, main, run_step, select_options


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": f"line {n} of some words"}) for n in range(200)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    return run("import_data", source=str(tmp_path / "in"), output=str(tmp_path / "corpus")).artifact.uri


def run(component: str, **values: Any) -> Result:
    return execute(component, load_config(component).decode(values, component))


def test_the_same_work_is_not_done_twice(corpus, tmp_path):
    first = run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=300)
    stamp = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    again = run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=300)
    assert again.artifact.manifest == first.artifact.manifest
    assert again.metrics == finite(first.metrics)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == stamp


def test_an_output_of_other_work_is_not_overwritten(corpus, tmp_path):
    made = run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=300).artifact.manifest
    with pytest.raises(
        ValueError, match=r"another run of tokenize \(vocab_size: there 300, here 310\); choose another"
    ):
        run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=310)
    assert Artifact.open(str(tmp_path / "out")).manifest == made


def test_work_killed_before_its_record_is_done_again(corpus, tmp_path):
    made = run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=300)
    (tmp_path / "out" / "run.json").unlink()
    again = run("tokenize", corpus=corpus, output=str(tmp_path / "out"), vocab_size=300)
    assert again.artifact.manifest == made.artifact.manifest
    assert json.loads((tmp_path / "out" / "run.json").read_text())["peak_rss_bytes"] > 1e6


def test_options_come_from_parameters_then_from_the_mapping():
    given = {"steps": 200, "seed": 0}
    assert select_options("train_fp8", {}, given) == given
    assert select_options("train_fp8", {"steps": 5}, given)["steps"] == 5
    assert select_options("train_fp8", {"train_fp8": {"steps": 5}, "merge": {"tolerance": 1}}, given)["steps"] == 5
    assert select_options("train_fp8", {"merge": {"tolerance": 1}}, given) == given
    with pytest.raises(ValueError, match="unknown component 'train'; known: preflight, import_data"):
        select_options("train_fp8", {"train": {}, "merge": {}}, given)


class Kfp(SimpleNamespace):
    """An artifact as KFP hands it to a face."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=str(path), uri=str(path), metadata={}, logged={})

    def log_metric(self, name: str, value: float) -> None:
        self.logged[name] = value


def test_a_face_gets_the_manifest_as_its_artifact(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv(telemetry.RUN_DIR_VARIABLE, str(tmp_path))
    taken, tokens, metrics = (
        Kfp(tmp_path / "import-data" / "data"),
        Kfp(tmp_path / "tokenize" / "tokens"),
        Kfp(tmp_path),
    )
    Path(taken.uri).parent.mkdir()
    Path(corpus).rename(taken.uri + DATA_SUFFIX)
    config = {"tokenize": {"append_eos": False}}
    options = {"vocab_size": 300}
    run_step("tokenize", inputs={"corpus": taken}, output=tokens, config=config, options=options, metrics=metrics)
    artifact = Artifact.open(tokens.uri + DATA_SUFFIX)
    assert Path(tokens.path).read_bytes() == artifact.manifest.encode()
    assert tokens.metadata["sha256"] == artifact.manifest.sha256
    assert artifact.manifest.options["append_eos"] is False
    assert metrics.logged["documents"] == 200
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["task"], event["event"]) for event in events if event["event"] != "progress"] == [
        ("tokenize", "start"),
        ("tokenize", "done"),
    ]


def test_a_failing_face_says_why_and_leaves_no_artifact(tmp_path, monkeypatch):
    monkeypatch.setenv(telemetry.RUN_DIR_VARIABLE, str(tmp_path))
    output = Kfp(tmp_path / "tokenize" / "tokens")
    with pytest.raises(FileNotFoundError, match="no finished artifact"):
        run_step("tokenize", inputs={"corpus": Kfp(tmp_path / "nothing")}, output=output, config={"vocab_size": 300})
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failed"
    assert "no finished artifact" in last["error"]
    assert not Path(output.path).exists()


def test_the_command_line_ends_with_one_line_of_error(tmp_path):
    with pytest.raises(SystemExit) as caught:
        main("tokenize", ["--corpus", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")])
    assert str(caught.value).startswith("error: ")
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_is_left_out():
    assert finite({"loss": float("nan"), "norm": float("inf"), "steps": 3}) == {"steps": 3.0}


def test_the_step_line_is_stable(caplog):
    with caplog.at_level("INFO"):
        telemetry.step_line(12, 200, loss=5.12345678, grad_norm=float("nan"))
    assert caplog.messages == ["crosstrain step=12 total=200 loss=5.12346 grad_norm=nan"]


def test_peak_memory_is_this_processs_own():
    """Not what the process that started it holds, which is what ru_maxrss tells."""
    held = b"x" * (400 << 20)
    code = "from crosstrain.components.core.telemetry import peak_rss_bytes as p; a = b'x' * (100 << 20); print(p())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False)
    assert 100 << 20 < int(done.stdout) < len(held)
