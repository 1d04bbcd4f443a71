"""What a run is doing, gathered from events.

The process that runs the pipeline writes an event as it starts a step and one as the step's process has ended;
crosstrain's steps write more between. Showing it is `display`'s part.
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
from crosstrain.pipelines.spec import ANY, Task


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
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Output artifact to its schema title: system.HTML."""

    @property
    def seconds(self) -> float:
        """Wall time so far, or in all."""
        return (self.ended or time.time()) - self.started if self.started else 0.0


class Progress:
    """The state of all steps. Feed it events."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.steps = {task.name: Step(task.name, task.title, task.component, outputs=task.outputs) for task in tasks}
        """Task to step; a loop over what is not known yet is there once, until its first iteration comes."""
        self.error = ""
        """A failure that belongs to no step."""
        self._loops = [step for name, step in self.steps.items() if ANY in name]

    def event(self, event: Mapping[str, Any]) -> Step | None:
        """Take one event of events.jsonl; the step it changed, if any."""
        kind, name = event["event"], event["task"]
        if not name:
            self.error = event["error"]
            return None
        step = self._step(name)
        if kind == "executing":
            self._start(step, event["time"])
        elif kind == "start":
            self._start(step, event["time"])
            step.component = event["component"]
        elif kind == "progress":
            step.progress = {key: value for key, value in event.items() if key not in ("time", "task", "event")}
        elif kind == "done":
            step.ended, step.uri, step.metrics = event["time"], event["uri"], event["metrics"]
            step.status = "reused" if _read_output(step) < step.started else "done"
        elif kind == "failed":
            step.status, step.ended, step.error = "failed", event["time"], event["error"]
        elif kind == "ended" and not _end(step, event):
            return None
        return step

    def _start(self, step: Step, now: float) -> None:
        if step.status != "running":
            step.status, step.started, step.ended, step.error, step.progress = "running", now, 0.0, "", {}

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
        if name not in self.steps:
            self.steps[name] = self._iteration(name) or Step(name, name, "")
        return self.steps[name]

    def _iteration(self, name: str) -> Step | None:
        """A step of a loop that was not known before the run, in place of what stood for all of them."""
        for step in self._loops:
            if found := re.fullmatch(re.escape(step.task).replace(re.escape(ANY), r"(\d+)"), name):
                self.steps.pop(step.task, None)
                title = step.title.replace(ANY, "{}").format(*found.groups())
                return Step(name, title, step.component, outputs=step.outputs)
        return None


def _end(step: Step, event: Mapping[str, Any]) -> bool:
    """The step's process has ended, after its own events if it writes any; whether that is news."""
    before = step.status, step.error
    if event["succeeded"]:
        if step.status == "running":
            step.status, step.ended = "done", event["time"]
        return (step.status, step.error) != before
    step.status, step.ended = "failed", step.ended or event["time"]
    said = event["said"] or "nothing"
    if event["signal"]:
        step.error = f"killed by {describe_signal(event['signal'])}"
    elif not step.error:
        step.error = f"died without an error of its own; the last it said: {said}" if step.component else said
    return (step.status, step.error) != before


def _read_output(step: Step) -> float:
    """Fill in what the step's output says of itself; the time at which it was begun."""
    artifact = Artifact.open(step.uri)
    record = json.loads(artifact.store.read(RECORD_NAME))
    step.manifest_sha256, step.peak_rss_bytes = artifact.manifest.sha256, record["peak_rss_bytes"]
    return float(record["started"])
