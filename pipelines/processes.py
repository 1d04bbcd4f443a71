"""Leaving no process behind: every descendant of this process is found, asked to end, and then made to.

A step may start sessions of its own (torchrun's workers do), so a process group is not enough. On Linux this
process adopts descendants whose parent died (PR_SET_CHILD_SUBREAPER) and can be told of its own parent's
death (PR_SET_PDEATHSIG); elsewhere only what is still below it in the process tree is found.
"""

import ctypes
import os
import signal
import sys

import psutil

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they stay findable."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent dies; exit at once if it is dead already.

    Args:
        parent: Process id of the parent, as the parent knows it.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def end_descendants(grace: float = GRACE_SECONDS) -> None:
    """End every descendant: SIGTERM to all, SIGKILL to those alive after `grace` seconds, until none is left."""
    this = psutil.Process()
    descendants = this.children(recursive=True)
    for process in descendants:
        _send(process, signal.SIGTERM)
    psutil.wait_procs(descendants, timeout=grace)
    while descendants := this.children(recursive=True):
        for process in descendants:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(descendants, timeout=1)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def describe_signal(number: int) -> str:
    """`signal 9 (SIGKILL): …`, with what usually sends it."""
    try:
        name = f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
    return f"{name}: the kernel sends it when memory runs out" if number == signal.SIGKILL else name
