"""Iterations of a loop: told apart in folders, logs, events and the table, also while two run at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstrain.pipelines import spec
from crosstrain.pipelines.progress import Progress


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    return {step["task"]: step for step in json.loads((folder / "summary.json").read_text())["steps"]}


def names(compiled: dict[str, Path], **values: Any) -> dict[str, str]:
    return {task.name: task.title for task in spec.load(str(compiled["looping"])).tasks(values)}


def test_a_loop_over_what_is_known_gives_each_iteration_as_a_step(compiled: dict[str, Path]) -> None:
    assert names(compiled, places=[7.0, "x"], number=2, broken=-1) == {
        "for-loop-1-iteration-0/visit": "Visit, place 7",
        "for-loop-1-iteration-1/visit": "Visit, place x",
        "count": "count",
        "for-loop-2-iteration-*/visit-2": "Visit again, *",
        "gather": "gather",
    }
    assert "for-loop-1-iteration-*/visit" in names(compiled)


def test_steps_of_a_loop_take_the_place_of_what_stood_for_them(compiled: dict[str, Path]) -> None:
    progress = Progress(spec.load(str(compiled["looping"])).tasks({"places": [1], "number": 1, "broken": -1}))
    for number in (11, 0):
        task = f"for-loop-2-iteration-{number}/visit-2"
        progress.event({"event": "executing", "task": task, "time": 1.0 + number})
        ended = {"event": "ended", "task": task, "time": 20.0, "succeeded": True, "signal": 0, "said": "x"}
        assert progress.event(ended) is not None
        assert progress.event(ended) is None, "no news"
    assert [(step.title, step.status) for step in progress.steps.values() if "visit-2" in step.task] == [
        ("Visit again, 11", "done"),
        ("Visit again, 0", "done"),
    ]
    assert progress.steps["for-loop-2-iteration-0/visit-2"].outputs["note"] == "system.Dataset"


def test_iterations_that_run_at_once_are_told_apart(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = crosstrain("run", compiled["looping"], "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = steps(out)
    assert {name: (step["title"], step["status"], step["metrics"]) for name, step in found.items()} == {
        "for-loop-1-iteration-0/visit": ("Visit, place 3", "done", {"place": 3.0}),
        "for-loop-1-iteration-1/visit": ("Visit, place 4", "done", {"place": 4.0}),
        "count": ("count", "done", {}),
        "for-loop-2-iteration-0/visit-2": ("Visit again, 0", "done", {"place": 0.0}),
        "for-loop-2-iteration-1/visit-2": ("Visit again, 1", "done", {"place": 1.0}),
        "gather": ("gather", "done", {}),
    }
    assert (out / "report.html").read_text() == "known 3, known 4, made 0, made 1"
    note = out / "artifacts" / "looping" / "for-loop-2-iteration-1" / "visit-2" / "note"
    assert note.read_text() == "made 1"
    log = (out / "logs" / "run.log").read_text().splitlines()
    for number, place in enumerate((3, 4)):
        assert f"[for-loop-1-iteration-{number}/visit] visiting known {place}" in log
    for title in ("Visit, place 3", "Visit again, 1"):
        assert f"{title}: started" in done.stdout and f"{title}: done in" in done.stdout


@pytest.mark.parametrize("broken", [4, 1])
def test_an_iteration_that_dies_is_the_one_that_failed(
    crosstrain, compiled: dict[str, Path], tmp_path: Path, broken: int
) -> None:
    out = tmp_path / "out"
    done = crosstrain("run", compiled["looping"], "--set", f"broken={broken}", "--out", out)
    assert done.returncode == 1
    failed = {name for name, step in steps(out).items() if step["status"] == "failed"}
    assert failed == {"for-loop-1-iteration-1/visit" if broken == 4 else "for-loop-2-iteration-1/visit-2"}
    assert f"error: Visit{'' if broken == 4 else ' again'}, " in done.stderr
    assert "killed by signal 9 (SIGKILL)" in done.stderr
    assert steps(out)["gather"]["status"] == "skipped"
    again = crosstrain("run", compiled["looping"], "--out", out)
    assert again.returncode == 0, again.stderr
    assert {step["status"] for step in steps(out).values()} == {"done"}


def test_own_steps_of_a_loop_write_their_own_events_and_logs(
    crosstrain, compiled: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n" * (3 if name == "one" else 4))
    out = tmp_path / "out"
    corpora = json.dumps([str(tmp_path / f"{name}.txt") for name in ("one", "two")])
    done = crosstrain("run", compiled["importing-all"], "--set", f"corpora={corpora}", "--out", out)
    assert done.returncode == 0, done.stderr
    found = steps(out)
    assert list(found) == [f"for-loop-1-iteration-{number}/import-data" for number in (0, 1)] or len(found) == 2
    assert len({step["manifest_sha256"] for step in found.values()}) == 2
    for task, step in found.items():
        assert step["component"] == "import_data" and step["uri"].startswith(str(out / "artifacts" / "importing-all"))
        assert Path(task).parts[0] in step["uri"]
        assert (out / "logs" / f"{task}.log").is_file()


def test_a_loops_options_are_checked_before_the_run(crosstrain, compiled: dict[str, Path], tmp_path: Path) -> None:
    done = crosstrain("run", compiled["importing-all"], "--set", 'corpora=["a", ""]', "--out", "out")
    assert done.returncode == 2 and "source" in done.stderr
    assert not (tmp_path / "out").exists()
