"""What a run is doing, gathered from the steps' events and from KFP's own log lines.

crosstrain's steps write events; a foreign component shows by KFP's lines alone. Showing it is `display`'s part.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import RECORD_NAME
from crosstrain.pipelines.processes import describe_signal
from crosstrain.pipelines.spec import Task

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXECUTING = re.compile(r"Executing task '([^']+)'")
_FINISHED = re.compile(r"Task '([^']+)' finished with status (SUCCESS|FAILURE)")
_SIGNALLED = re.compile(r"^\s*crosstrain: the step's process was ended by signal (\d+)")


@dataclass
class Step:
    """One step of the run, as far as it is known."""

    task: str
    title: str
    component: str
    status: str = "pending"
    """pending, running, done, reused (its output was there already), failed, stopped or skipped."""
    started: float = 0.0
    ended: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    uri: str = ""
    """Prefix of the artifact it made."""
    manifest_sha256: str = ""
    peak_rss_bytes: int = 0
    """Largest resident memory of the step's main process; 0 where it is not known."""
    error: str = ""
    progress: dict[str, float] = field(default_factory=dict)
    last_line: str = "nothing"
    """The last line that the step printed."""

    @property
    def seconds(self) -> float:
        """Wall time so far, or in all."""
        return (self.ended or time.time()) - self.started if self.started else 0.0


class Progress:
    """The state of all steps. Feed it events and the runner's output lines."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.steps = {task.name: Step(task.name, task.title, task.component) for task in tasks}
        self.error = ""
        """A failure that belongs to no step."""
        self._current = ""
        self._signal = 0

    def event(self, event: Mapping[str, Any]) -> Step | None:
        """Take one event of events.jsonl; the step it changed, if any."""
        kind, name = event["event"], event["task"]
        if not name:
            self.error = event["error"]
            return None
        step = self._step(name)
        if kind == "start":
            self._start(step, event["time"])
            step.component = event["component"]
        elif kind == "progress":
            step.progress = {key: value for key, value in event.items() if key not in ("time", "task", "event")}
        elif kind == "done":
            step.ended, step.uri, step.metrics = event["time"], event["uri"], event["metrics"]
            step.status = "reused" if _read_output(step) < step.started else "done"
        elif kind == "failed":
            step.status, step.ended, step.error = "failed", event["time"], event["error"]
        return step

    def _start(self, step: Step, now: float) -> None:
        if step.status != "running":
            step.status, step.started, step.ended, step.error, step.progress = "running", now, 0.0, "", {}

    def line(self, raw: str) -> Step | None:
        """Take one line of the runner's output; the step it changed, if any."""
        line = _COLOURS.sub("", raw).rstrip()
        if found := _EXECUTING.search(line):
            step = self._step(found.group(1))
            self._current, self._signal = step.task, 0
            step.last_line = "nothing"
            self._start(step, time.time())
            return step
        if found := _FINISHED.search(line):
            return self._finish(self._step(found.group(1)), found.group(2) == "SUCCESS")
        if found := _SIGNALLED.match(line):
            self._signal = int(found.group(1))
        elif self._current and line.strip():
            self._step(self._current).last_line = line.strip()
        return None

    def _finish(self, step: Step, success: bool) -> Step | None:
        if success:
            if step.status != "running":
                return None
            step.status, step.ended = "done", time.time()
            return step
        step.ended = step.ended or time.time()
        step.status = "failed"
        if self._signal:
            step.error = f"killed by {describe_signal(self._signal)}"
        elif not step.error:
            silent = f"died without an error of its own; the last it said: {step.last_line}"
            step.error = silent if step.component else step.last_line
        return step

    def close(self, stopped: bool) -> None:
        """The runner has ended: what still runs was stopped or died, what never started was skipped."""
        for step in self.steps.values():
            if step.status == "running":
                step.status, step.ended = ("stopped" if stopped else "failed"), time.time()
                step.error = "" if stopped else "the process that runs the pipeline died"
            elif step.status == "pending":
                step.status = "skipped"

    def ordered(self) -> list[Step]:
        """Steps in the order in which they started; then those that have not, in the pipeline's order."""
        started = sorted((step for step in self.steps.values() if step.started), key=lambda step: step.started)
        return started + [step for step in self.steps.values() if not step.started]

    def failed(self) -> list[Step]:
        return [step for step in self.ordered() if step.status == "failed"]

    def _step(self, name: str) -> Step:
        return self.steps.setdefault(name, Step(name, name, ""))


def _read_output(step: Step) -> float:
    """Fill in what the step's output says of itself; the time at which it was begun."""
    artifact = Artifact.open(step.uri)
    record = json.loads(artifact.store.read(RECORD_NAME))
    step.manifest_sha256, step.peak_rss_bytes = artifact.manifest.sha256, record["peak_rss_bytes"]
    return float(record["started"])
