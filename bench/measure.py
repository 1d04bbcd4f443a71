"""What a process and all its children cost: wall seconds, CPU seconds, peak memory.

Every arm of a bench is a fresh process, so that none warms another's imports, allocator or threads.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Cost:
    """What one process tree came to."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Resident memory of all its processes together (unique pages plus shared), largest of the samples."""
    peak_worker_bytes: int
    """Resident memory of its largest process at its highest, as the kernel counted it."""
    output: dict[str, Any]
    """The JSON object that it printed last."""


def measure(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Run `python ARGUMENTS` to its end.

    Raises:
        ChildProcessError: it failed; with the end of what it said.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    peak, cpu = [0, 0], dict[int, float]()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, cpu), daemon=True)
    sampler.start()
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read() if process.stderr else ""), daemon=True)
    reader.start()
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    reader.join()
    sampler.join()
    if process.returncode:
        raise ChildProcessError(f"{' '.join(arguments)}: status {process.returncode}:\n{said[0][-1500:]}")
    found = [line for line in lines if line.startswith("{")]
    return Cost(
        seconds,
        max(usage.ru_utime + usage.ru_stime, sum(cpu.values())),  # some children are never waited for
        *peak,
        json.loads(found[-1]) if found else {},
    )


def _sample(pid: int, peak: list[int], cpu: dict[int, float]) -> None:
    """Look at a process tree until it ends: its largest memory together, and the CPU seconds of each process."""
    try:
        top = psutil.Process(pid)
        while top.is_running() and top.status() != psutil.STATUS_ZOMBIE:
            tree = (top, *top.children(recursive=True))
            peak[0] = max(peak[0], sum(_pss(process) for process in tree))
            peak[1] = max(peak[1], *(_highest(process) for process in tree))
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    cpu[process.pid] = times.user + times.system
            time.sleep(SAMPLE_SECONDS)
    except psutil.NoSuchProcess:
        return


def _highest(process: psutil.Process) -> int:
    """The most resident memory that a process has had so far (what wait4 tells counts the parent's at the fork too)."""
    lines = _lines(f"/proc/{process.pid}/status")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _pss(process: psutil.Process) -> int:
    """Resident memory of a process, pages that it shares divided among those who share them."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, psutil.Error):
        return 0  # it has just ended
    return 0


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_1_minute": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(**figures: Any) -> dict[str, Any]:
    """Print one JSON line, and return it."""
    line = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(line), flush=True)
    return line


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []  # a process that has just ended
