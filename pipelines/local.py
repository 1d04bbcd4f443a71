"""Running a compiled pipeline on this machine, through KFP's own local runner in a process of its own.

The bytes that run are the compiled file's bytes, copied to `pipeline.yaml` in the run's folder. The folder also
gets `artifacts/` (every step's outputs), `state/` (checkpoints), `logs/`, `events.jsonl`, the HTML reports and
`summary.json`. Run again with the same folder, finished steps are found and training resumes. Left out: KFP's
own caching, which knows nothing of what a step's output is worth.
"""

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rich.console import Console

from crosstrain.components.core.telemetry import RUN_DIR_VARIABLE
from crosstrain.pipelines import processes, summary
from crosstrain.pipelines.display import Display, LiveDisplay, PlainDisplay, print_table
from crosstrain.pipelines.progress import Progress, Step
from crosstrain.pipelines.run_folder import RunFolder
from crosstrain.pipelines.spec import Pipeline

_POLL_SECONDS = 0.1
_TABLE_WIDTH = 140
"""Columns where the output is no terminal."""

_PYTHON = """#!/bin/sh
# `python3` of a pipeline's steps: the Python that crosstrain runs in.
exec {python} "$@"
"""


def run(pipeline: Pipeline, values: Mapping[str, Any], folder: RunFolder, verbose: bool) -> int:
    """Run a pipeline to its end, showing its progress; the process status for it.

    Args:
        pipeline: The compiled pipeline.
        values: Every parameter's value, as `parameters.complete` returns them.
        folder: Where everything goes.
        verbose: Print all that the steps print, instead of a display.

    Returns:
        0: succeeded; 1: failed; 128 + n: stopped by signal n.

    Raises:
        ValueError: KFP's local runner cannot run this pipeline, or the folder is another run's.
    """
    tasks = pipeline.tasks(values)
    check_runnable(pipeline)
    progress = Progress(tasks)
    started = time.time()
    with folder, _signals() as received:
        folder.prepare(pipeline, values, tasks)
        folder.write_summary(summary.describe(pipeline, values, progress, "running", started, None, ()))
        console = Console()
        live = console.is_terminal and not console.is_dumb_terminal and not verbose
        display: Display = LiveDisplay(progress, console) if live else PlainDisplay()
        with display:
            code = _Runner(pipeline, values, folder, progress, display, verbose).run(received)
        progress.close(stopped=bool(received))
        summary.read_foreign_metrics(folder, progress)
        reports = summary.collect_reports(folder, progress)
        status = "stopped" if received else "failed" if code or progress.failed() else "succeeded"
        folder.write_summary(summary.describe(pipeline, values, progress, status, started, time.time(), reports))
    print_table(progress, console if console.is_terminal else Console(width=_TABLE_WIDTH))
    spent = summary.cost(progress)
    print(f"cost: {spent['usd']:,.2f} {spent['basis']}" if spent["usd"] is not None else spent["basis"])
    for report in reports:
        print(f"report: {report}")
    print(f"summary: {folder.summary}", flush=True)
    if received:
        print(f"error: stopped by {processes.describe_signal(received[0])}; run it again to go on", file=sys.stderr)
        return 128 + received[0]
    if status == "failed":
        _report_failure(progress, folder, code)
    return 1 if status == "failed" else 0


def check_runnable(pipeline: Pipeline) -> None:
    """Refuse what KFP's local runner would refuse in the middle of a run."""
    artifacts = pipeline.document["root"].get("inputDefinitions", {}).get("artifacts", {})
    needed = [name for name, item in artifacts.items() if not item.get("isOptional")]
    if needed:
        raise ValueError(
            f"{pipeline.name}: takes an artifact ({needed[0]}), which KFP's local runner cannot pass in; run a "
            "pipeline that makes it, or the component's program: python -m crosstrain.components.NAME"
        )
    for label, executor in pipeline.document["deploymentSpec"]["executors"].items():
        command = " ".join(executor.get("container", {}).get("command", ()))
        if "container" in executor and "--component_module_path" not in command:
            raise ValueError(
                f"{pipeline.name}: step {label.removeprefix('exec-')} is a container, and KFP's local runner "
                "runs lightweight Python components only; run this pipeline on a cluster"
            )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Runner:
    """The child process, what it prints, and the events its steps write."""

    def __init__(
        self,
        pipeline: Pipeline,
        values: Mapping[str, Any],
        folder: RunFolder,
        progress: Progress,
        display: Display,
        verbose: bool,
    ) -> None:
        self._request = {
            "pipeline": str(folder.pipeline),
            "arguments": dict(values),
            "root": str(folder.artifacts),
            "parent": os.getpid(),
        }
        self._folder, self._progress, self._display, self._verbose = folder, progress, display, verbose
        self._events_read = folder.events.stat().st_size if folder.events.exists() else 0

    def run(self, received: list[int]) -> int:
        """Start the child, follow it until it ends or a signal comes, and leave no process behind; its status."""
        processes.adopt_orphans()
        scratch = tempfile.TemporaryDirectory(prefix="crosstrain-run-", ignore_cleanup_errors=True)
        with scratch as scratch_folder, self._folder.log.open("ab") as log:
            child = self._start(Path(scratch_folder))
            try:
                self._follow(child, log, received)
            finally:
                processes.end_descendants()
            return child.wait()

    def _start(self, scratch: Path) -> "subprocess.Popen[bytes]":
        python = scratch / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(_PYTHON.format(python=shlex.quote(sys.executable)))
        python.chmod(0o755)
        child = subprocess.Popen(
            [sys.executable, "-m", "crosstrain.pipelines.kfp_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(self._folder.lock,),
            env={
                **os.environ,
                RUN_DIR_VARIABLE: str(self._folder.path),
                "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
                "PYTHONUNBUFFERED": "1",
                "PYTHONSAFEPATH": "1",  # a tokenize.py in the user's folder is not the standard library's
            },
        )
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(json.dumps({**self._request, "scratch": str(scratch)}).encode())
        return child

    def _follow(self, child: "subprocess.Popen[bytes]", log: IO[bytes], received: list[int]) -> None:
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not received:
                if selector.select(_POLL_SECONDS):
                    data = os.read(child.stdout.fileno(), 1 << 16)
                    log.write(data)
                    log.flush()
                    if self._verbose:
                        sys.stdout.buffer.write(data)
                        sys.stdout.flush()
                    if not data:
                        break
                elif child.poll() is not None:
                    break
                self._read_events()
                self._display.tick()
        self._read_events()

    def _read_events(self) -> None:
        if not self._folder.events.exists():
            return
        with self._folder.events.open("rb") as stream:
            stream.seek(self._events_read)
            whole = stream.read().rpartition(b"\n")[0]
        if whole:
            self._events_read += len(whole) + 1
            for line in whole.split(b"\n"):
                self._changed(self._progress.event(json.loads(line)))

    def _changed(self, step: Step | None) -> None:
        if step is not None and not self._verbose:
            self._display.update(step)


def _report_failure(progress: Progress, folder: RunFolder, code: int) -> None:
    """One `error:` line for each step that failed, after the last lines of one that died without a word."""
    failed = progress.failed()
    for step in failed:
        log = folder.logs / f"{step.task}.log"
        if not log.is_file():
            log = folder.log
        name = step.task if step.title == step.task else f"{step.title} ({step.task})"
        print(f"error: {name} failed: {step.error}; log: {log}", file=sys.stderr)
    if not failed:
        reason = progress.error or f"the process that runs the pipeline ended with status {code}"
        print(f"error: {reason}; log: {folder.log}", file=sys.stderr)
