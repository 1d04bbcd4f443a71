"""The folder of a local run: what lies where, one run in it at a time, and a finished run left as it is.

Steps find their finished outputs by the folder, so that continuing a run means naming its folder again. A run
that failed may go on with other parameters: a step whose finished output they would change refuses.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from crosstrain.components.core.artifact import check_writable
from crosstrain.components.core.telemetry import EVENTS_NAME
from crosstrain.pipelines.spec import Pipeline, Task


class RunFolder:
    """A run's folder. As a context manager it makes the folder and holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.artifacts = self.path / "artifacts"
        self.pipeline = self.path / "pipeline.yaml"
        self.state = self.path / "state"
        self.events = self.path / EVENTS_NAME
        self.logs = self.path / "logs"
        self.log = self.logs / "run.log"
        """Everything that KFP and the steps printed."""
        self.summary = self.path / "summary.json"
        self.lock = -1
        """File descriptor of the lock, to be passed on to what must have ended before the next run starts."""

    def __enter__(self) -> Self:
        """Take the lock; the kernel frees it when the last process that holds it ends, however it ends.

        Raises:
            PermissionError: the folder cannot be made or written to.
            ValueError: another run has the lock.
        """
        check_writable(self.path)
        lock = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise ValueError(
                f"{self.path}: the run of process {holder or '?'} is not over; wait for it, or choose another --out"
            ) from None
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self.lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.lock)

    def prepare(self, pipeline: Pipeline, values: Mapping[str, Any], tasks: Iterable[Task]) -> None:
        """Lay out the folder for a run, or for going on with one.

        Outputs of steps that are not crosstrain's are removed: such steps expect none.

        Raises:
            ValueError: the folder holds a run of another pipeline, or a finished one with other parameters.
        """
        if self.summary.is_file():
            self._check_same(pipeline, values)
        self.logs.mkdir(exist_ok=True)
        self.pipeline.write_bytes(pipeline.data)
        for task in tasks:
            if not task.component:
                for left in self.artifacts.glob(f"*/{task.name}"):
                    shutil.rmtree(left)

    def _check_same(self, pipeline: Pipeline, values: Mapping[str, Any]) -> None:
        before = json.loads(self.summary.read_bytes())
        difference = ""
        if before["pipeline"] != pipeline.name:
            difference = f"of {before['pipeline']}"
        elif before["status"] == "succeeded":
            if before["pipeline_sha256"] != pipeline.sha256:
                difference = "of another version of the pipeline"
            elif changed := [name for name in values if before["parameters"][name] != values[name]]:
                name = changed[0]
                difference = f"with another {name}: there {before['parameters'][name]!r}, here {values[name]!r}"
        if difference:
            raise ValueError(f"{self.path}: holds a run {difference}; choose another --out, or delete the folder")

    def output(self, task: str) -> Path | None:
        """The folder with a task's outputs, if it made one."""
        return next(self.artifacts.glob(f"*/{task}"), None)

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        scratch = self.summary.with_suffix(".tmp")
        scratch.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(scratch, self.summary)
