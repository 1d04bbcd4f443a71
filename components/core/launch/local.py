"""A job on this machine: torchrun as a child, its rank 0 on our output, nothing left behind.

torchrun gives every worker a session of its own, so a process group does not hold them: SIGTERM goes to torchrun,
which ends its workers; what outlives the grace time is killed with all its descendants. On Linux torchrun is also
told when this process dies without a word.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from typing import IO

import psutil

from crosstrain.components.core.launch import failure
from crosstrain.components.core.launch.job import Exit, Job, JobFailed, JobResult
from crosstrain.components.core.launch.plan import LOG_PREFIX, LOG_PREFIX_VARIABLE, processes_per_node
from crosstrain.components.core.launch.signals import on_stop

END_SECONDS = 5
"""How long torchrun may take to end after its output did."""

KEPT_LINES = 2_000
"""Lines of output that are kept to find the failing rank's last ones in."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1

_MARK = "CROSSTRAIN_LAUNCH"
"""Variable that every process of one launch carries, so that none is missed at the end."""


def run_local(job: Job) -> JobResult:
    """Run the job on this machine and wait for it; rank 0's lines go to standard output.

    SIGTERM and SIGINT end the job first, when called in the main thread.

    Raises:
        JobFailed: a rank failed, the time was up, or the job was stopped; with the failing rank's last lines.
    """
    processes = processes_per_node(job)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="crosstrain-torchrun-") as logs:
        stop = _Stop()
        with on_stop(stop.handle):
            mark = uuid.uuid4().hex
            child = _start(job, processes, logs, mark)
            try:
                lines, reason = _follow(child, stop, job)
            finally:
                _end(child, mark)
        code = child.returncode
    seconds = time.time() - started
    cause = failure.root_cause(lines)
    rank, rank_code = (cause.rank, cause.code) if cause else (None, None)
    failed = bool(reason) or code != 0
    if failed and not reason:
        ending = f"rank {rank} ended with exit status {rank_code}" if cause else f"torchrun ended with {code}"
        reason = f"{ending} after {seconds:.0f} s"
    result = JobResult(
        name=job.name,
        target="local",
        state="failed" if failed else "succeeded",
        reason=reason,
        tail=failure.tail(lines, rank) if failed else (),
        exits=(Exit(node=0, code=code, rank=rank, rank_code=rank_code, finished=started + seconds),),
        processes_per_node=processes,
        instance_type=job.run_on.instance_type,
        seconds_running=seconds,
    )
    if failed:
        raise JobFailed(result)
    return result


class _Stop:
    """Which signal asked for the end, and the child to pass it on to."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.child: subprocess.Popen[str] | None = None
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """The child's output; an empty line wakes who waits, None is the end. May be filled in a signal handler."""

    def handle(self, number: signal.Signals) -> None:
        """Pass the signal on, as SIGTERM: torchrun ends its workers on it."""
        self.signal = number
        if self.child is not None:
            self.child.terminate()
            self.lines.put("")


def _start(job: Job, processes: int, logs: str, mark: str) -> subprocess.Popen[str]:
    command = [
        *job.front, sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={processes}", "--tee=3", f"--log-dir={logs}", "--max-restarts=0",
        "-m", job.module, *job.arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **job.run_on.env, LOG_PREFIX_VARIABLE: LOG_PREFIX, _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(child: subprocess.Popen[str], stop: _Stop, job: Job) -> tuple[list[str], str]:
    """Print rank 0's lines until the child ends; its last lines, and why it was made to end, if it was."""
    limits = job.run_on.timeouts
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    assert child.stdout is not None
    threading.Thread(target=_read, args=(child.stdout, stop.lines), daemon=True).start()
    stop.child = child
    if stop.signal is not None:  # it came before the child was known
        child.terminate()
    deadline, reason = time.monotonic() + limits.run, ""
    while True:
        try:
            line = stop.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if reason:
                break  # the grace time is up, too
            reason, deadline = f"not done after {limits.run} s (timeouts.run)", time.monotonic() + limits.grace
            child.terminate()
            continue
        if stop.signal is not None and not reason:
            reason, deadline = f"stopped by {stop.signal.name}", time.monotonic() + limits.grace
        if line is None:
            break
        kept.append(line)
        rank, text = failure.split_rank(line)
        if rank in (0, None) and text:
            print(text, flush=True)
    return list(kept), reason


def _read(stream: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _end(child: subprocess.Popen[str], mark: str) -> None:
    """Leave nothing of this launch running."""
    try:
        child.wait(timeout=END_SECONDS)  # it closed its output, so it is about to end
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                process.kill()
        except psutil.Error:  # not ours to look into, or gone
            continue
