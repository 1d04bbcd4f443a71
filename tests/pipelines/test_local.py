"""Running compiled pipelines here: KFP's own runner, real steps, real processes, real signals."""

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from crosstrain.components.core.artifact import Artifact


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    return {step["task"]: step for step in summary(folder)["steps"]}


def test_the_compiled_bytes_run_and_the_summary_says_so(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    """In a relative folder with spaces and `python3` in its name, beside a file that shadows the standard library."""
    (tmp_path / "tokenize.py").write_text("raise SystemExit('the wrong tokenize')")
    out = tmp_path / "my python3.11 runs" / "a"
    done = crosstrain("run", compiled["words"], "--set", "text=from python3", "--out", out.relative_to(tmp_path))
    assert done.returncode == 0, done.stderr
    found = summary(out)
    assert found["pipeline_sha256"] == hashlib.sha256(compiled["words"].read_bytes()).hexdigest()
    assert (out / "pipeline.yaml").read_bytes() == compiled["words"].read_bytes()
    assert found["pipeline"] == "words" and found["status"] == "succeeded"
    assert found["parameters"]["text"] == "from python3" and found["parameters"]["count"] == 3
    assert found["parameters"]["state"] == str(out / "state")
    assert set(found["versions"]) == {"crosstrain", "kfp"} and found["started"] <= found["ended"]
    assert [(step["task"], step["status"]) for step in found["steps"]] == [
        ("make", "done"),
        ("use", "done"),
        ("use-2", "skipped"),
    ]
    assert steps(out)["use"]["metrics"] == {"length": 12.0}
    assert found["reports"] == [str(out / "report.html")]
    assert found["cost"]["usd"] is None and found["cost"]["basis"] in done.stdout
    assert (out / "report.html").read_text() == "<p>from python3</p>"
    lines = done.stdout.splitlines()
    assert [line[10:].split(" in ")[0] for line in lines[:4]] == [
        "Make the words: started",
        "Make the words: done",
        "use: started",
        "use: done",
    ]
    assert lines[4].split() == ["step", "status", "time", "peak", "memory", "metrics"]
    assert f"report: {out / 'report.html'}" in lines
    assert "Executing task" in (out / "logs" / "run.log").read_text()


def test_crosstrains_steps_report_their_artifact(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("some text\n")
    out = tmp_path / "out"
    arguments = ("run", compiled["importing"], "--set", "corpus=corpus.txt", "--out", out)
    done = crosstrain(*arguments)
    assert done.returncode == 0, done.stderr
    step = steps(out)["import-data"]
    assert step["component"] == "import_data" and step["peak_rss_bytes"] > 1 << 20
    artifact = Artifact.open(step["uri"], "corpus")
    assert step["manifest_sha256"] == artifact.manifest.sha256
    assert step["metrics"]["files"] == 1
    assert "files 1" in done.stdout
    assert (out / "logs" / "import-data.log").is_file()
    again = crosstrain(*arguments)
    assert again.returncode == 0, again.stderr
    assert steps(out)["import-data"]["uri"] == step["uri"]


def test_a_run_goes_on_in_its_folder(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert crosstrain("run", compiled["words"], "--set", "text=a", "--set", "mode=raise", "--out", out).returncode == 1
    assert crosstrain("run", compiled["words"], "--set", "text=a", "--out", out).returncode == 0
    assert crosstrain("run", compiled["words"], "--set", "text=a", "--out", out).returncode == 0
    other = crosstrain("run", compiled["words"], "--set", "text=b", "--out", out)
    assert other.returncode == 2
    assert "holds a run with another text: there 'a', here 'b'" in other.stderr
    assert "holds a run of words" in crosstrain("run", compiled["importing"], "--set", "corpus=c", "--out", out).stderr
    assert summary(out)["parameters"]["text"] == "a"


def test_a_finished_step_is_not_done_again(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("some text\n" * 50)
    arguments = ("run", compiled["tokenizing"], "--set", "corpus=corpus.txt", "--out", "out")
    first = crosstrain(*arguments)
    assert first.returncode == 0, first.stderr
    before = steps(tmp_path / "out")["tokenize"]
    again = crosstrain(*arguments)
    assert again.returncode == 0, again.stderr
    after = steps(tmp_path / "out")["tokenize"]
    assert (before["status"], after["status"]) == ("done", "reused")
    assert after["manifest_sha256"] == before["manifest_sha256"] and after["metrics"] == before["metrics"]
    assert "tokenize: reused in " in again.stdout


@pytest.mark.slow
def test_a_run_whose_training_was_killed_resumes_to_the_same_bits(
    crosstrain, command: list[str], compiled: dict[str, Path], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"line {n} of {n * n} words"}) for n in range(2000)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    config = '{"train_fp8": {"checkpoint_every": 10, "threads": 1, "evaluate_every": 0}}'
    settings = ("--set", f"corpus={tmp_path / 'corpus.jsonl'}", "--set", f"config={config}")
    whole = crosstrain("run", compiled["training"], *settings, "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    arguments = ["run", str(compiled["training"]), *settings, "--out", str(tmp_path / "killed")]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        wait_for_step(run, tmp_path / "killed" / "events.jsonl", 15)
        for process in psutil.Process(run.pid).children(recursive=True):
            command = process.as_dict(["cmdline"], ad_value=[])["cmdline"]  # another child may have just ended
            if command[:3:2] == [sys.executable, "kfp.dsl.executor_main"]:
                process.kill()
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "train-fp8 failed: killed by signal 9 (SIGKILL)" in errors
    resumed = crosstrain(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "resum" in (tmp_path / "killed" / "logs" / "train-fp8.log").read_text()
    expected, found = steps(tmp_path / "whole")["train-fp8"], steps(tmp_path / "killed")["train-fp8"]
    assert found["manifest_sha256"] == expected["manifest_sha256"]
    assert found["metrics"]["train_loss"] == expected["metrics"]["train_loss"]


def wait_for_step(run: "subprocess.Popen[str]", events: Path, wanted: int) -> None:
    """Wait until training has logged a step."""
    while run.poll() is None:
        lines = events.read_text().splitlines() if events.exists() else []
        if any(json.loads(line).get("step", 0) >= wanted for line in lines if line.endswith("}")):
            return
        time.sleep(0.02)
    raise AssertionError(f"the run ended before: {run.communicate()}")


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("raise", "ValueError: no such luck"),
        ("kill", "killed by signal 9 (SIGKILL): the kernel sends it when memory runs out"),
    ],
)
def test_a_failed_step_shows_its_error_and_its_log(
    crosstrain, compiled: dict[str, Path], tmp_path: Path, mode: str, error: str
) -> None:
    done = crosstrain("run", compiled["words"], "--set", "text=a", "--set", f"mode={mode}", "--out", "out")
    assert done.returncode == 1
    assert done.stderr == f"error: use failed: {error}; log: {tmp_path / 'out' / 'logs' / 'run.log'}\n"
    assert summary(tmp_path / "out")["status"] == "failed"
    assert [step["status"] for step in summary(tmp_path / "out")["steps"]] == ["done", "failed", "skipped"]
    assert steps(tmp_path / "out")["use"]["error"] == error


def test_a_crosstrain_step_shows_its_own_error(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    done = crosstrain("run", compiled["importing"], "--set", "corpus=none", "--out", "out")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: import-data failed: FileNotFoundError: ") and str(tmp_path / "none") in line
    assert line.endswith(f"log: {tmp_path / 'out' / 'logs' / 'import-data.log'}")


def test_verbose_prints_what_the_steps_print(crosstrain, compiled: dict[str, Path]) -> None:
    done = crosstrain("run", compiled["words"], "--set", "text=a", "--out", "out", "--verbose")
    assert done.returncode == 0
    assert "Executing task" in done.stdout and "Make the words: started" not in done.stdout


def test_on_a_terminal_every_step_has_a_line_that_is_kept_up_to_date(
    command: list[str], compiled: dict[str, Path], tmp_path: Path
) -> None:
    controller, terminal = pty.openpty()
    arguments = ["run", str(compiled["words"]), "--set", "text=a", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen([*command, *arguments], stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                data = os.read(controller, 1 << 16)
            except OSError:  # Linux's way of saying that the terminal's other end is closed
                break
            if not data:
                break
            shown += data
    os.close(controller)
    text = shown.decode()
    assert process.returncode == 0, text
    for part in ("· Make the words", "▸ Make the words", "✓ Make the words", "\x1b[1A", "peak memory", "report: "):
        assert part in text


# Stopping


class Sleeping:
    """A run whose step sleeps, with a child in a session of its own and an orphan; all carry `marker`."""

    def __init__(self, command: list[str], pipeline: Path, out: Path, stubborn: bool) -> None:
        self.marker = uuid.uuid4().hex
        settings = ["--set", f"marker={self.marker}", "--set", f"stubborn={str(stubborn).lower()}"]
        self.process = subprocess.Popen(
            [*command, "run", str(pipeline), *settings, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not (out / "asleep").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.05)
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.marked()) >= 3, "the step, its child and its orphan"

    def marked(self) -> list[psutil.Process]:
        return [
            item for item in psutil.process_iter(["cmdline"]) if self.marker in " ".join(item.info["cmdline"] or ())
        ]

    def alive(self) -> list[psutil.Process]:
        running = [item for item in self.descendants if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]
        return running + self.marked()

    def clean(self) -> None:
        for item in self.alive():
            item.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def sleeper(
    request: pytest.FixtureRequest, command: list[str], compiled: dict[str, Path], tmp_path: Path
) -> Iterator[Sleeping]:
    run = Sleeping(command, compiled["sleeping"], tmp_path / "out", request.param)
    yield run
    run.clean()


@pytest.mark.parametrize("sleeper", [False], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process_behind(sleeper: Sleeping, number: signal.Signals, tmp_path: Path) -> None:
    sleeper.process.send_signal(number)
    _, errors = sleeper.process.communicate(timeout=30)
    assert sleeper.alive() == []
    assert sleeper.process.returncode == 128 + number
    assert errors.splitlines() == [f"error: stopped by signal {number} ({number.name}); run it again to go on"]
    assert summary(tmp_path / "out")["status"] == "stopped"
    assert steps(tmp_path / "out")["sleep"]["status"] == "stopped"


@pytest.mark.parametrize("sleeper", [True], indirect=True)
def test_a_step_that_ignores_sigterm_is_killed(sleeper: Sleeping) -> None:
    sleeper.process.send_signal(signal.SIGINT)
    sleeper.process.communicate(timeout=30)
    assert sleeper.alive() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("sleeper", [True], indirect=True)
def test_killing_crosstrain_itself_ends_the_steps_and_frees_the_folder(
    crosstrain, sleeper: Sleeping, compiled: dict[str, Path], tmp_path: Path
) -> None:
    again = ("run", compiled["sleeping"], "--set", "marker=x", "--out", "out")
    refusal = f"error: {tmp_path / 'out'}: the run of process {sleeper.process.pid} is not over; "
    assert refusal in crosstrain(*again).stderr
    sleeper.process.kill()
    assert refusal in crosstrain(*again).stderr  # its steps are still being stopped
    deadline = time.monotonic() + 20
    while sleeper.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleeper.alive() == []
    assert summary(tmp_path / "out")["status"] == "running"
    freed = crosstrain("run", compiled["words"], "--set", "text=a", "--out", "out")
    assert "holds a run of sleeping" in freed.stderr  # and no longer that it is not over
