"""What a running step tells the outside: log lines, one machine-readable line a training step, and events.

Lines go to standard output, where `kubectl logs`, the KFP UI and HyperPod's log monitoring read them.
When `CROSSTRAIN_RUN_DIR` is set (by `crosstrain run`), the step also appends events to `events.jsonl` and
its log to `logs/<task>.log` in that folder, so that progress never depends on parsing another program's
output.
"""

import json
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

RUN_DIR_VARIABLE = "CROSSTRAIN_RUN_DIR"
TASK_VARIABLE = "CROSSTRAIN_TASK"
"""Set by `crosstrain run`: the task's name in the run, told apart from its other iterations."""
EVENTS_NAME = "events.jsonl"

log = logging.getLogger(__name__)

_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers that, as transformers is imported, warn of GPU kernels a machine without a GPU lacks."""

_task = ""


def start(task: str) -> None:
    """Set up logging for this process, and name the task that its events belong to."""
    global _task
    _task = task
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if (folder := _run_dir()) is not None:
        path = folder / "logs" / f"{task}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, force=True, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.captureWarnings(True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def emit(event: str, **fields: Any) -> None:
    """Append one event to the run's file, if there is one; whole lines even from several processes."""
    folder = _run_dir()
    if folder is None:
        return
    line = json.dumps({"time": time.time(), "task": _task, "event": event, **fields}, allow_nan=False) + "\n"
    handle = os.open(folder / EVENTS_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def peak_rss_bytes() -> int:
    """Most memory this process has held so far.

    Linux's VmHWM, because ru_maxrss starts at what the parent held when it forked.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def step_line(step: int, total: int, **values: float) -> None:
    """Report one training step: `crosstrain step=12 total=200 loss=5.1234 grad_norm=0.91 …`.

    The format is stable: HyperPod's log monitoring matches it. Values are printed as given, NaN included;
    the event leaves out what is not finite.
    """
    text = " ".join(f"{name}={value:.6g}" for name, value in values.items())
    log.info("crosstrain step=%d total=%d %s", step, total, text)
    finite_values = {name: value for name, value in values.items() if abs(value) < float("inf")}
    emit("progress", step=step, total=total, **finite_values)


def _run_dir() -> Path | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    return Path(folder) if folder else None
