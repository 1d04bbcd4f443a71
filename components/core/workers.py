"""Processes that share a step's work: how many there are, and what they have finished.

Workers are fresh processes (a fork would copy encoder and BLAS threads half), and one whose parent died ends itself.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

CONTEXT = multiprocessing.get_context("spawn")
"""Makes what workers share with their parent."""

TICK_SECONDS = 5.0


def count_workers(wanted: int, units: int) -> int:
    """Number of processes: what was asked for, or the CPUs this process may use; never more than units."""
    return max(1, min(wanted or available_cpus(), units))


def available_cpus() -> int:
    """CPUs of this process, by affinity and by the control group's quota (a pod's CPU limit)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cpus = min(cpus, max(1, round(int(limit) / int(period))))
    return cpus


def share_work(
    workers: int,
    start: Callable[..., None],
    arguments: tuple[Any, ...],
    function: Callable[[T], R],
    units: Sequence[T],
    tick: Callable[[], None] = lambda: None,
) -> Iterator[R]:
    """Results of `function` over units, as they finish, in any order.

    Args:
        workers: Number of processes.
        start: Called in each of them first, with `arguments`.
        arguments: May be pickled, or shared memory of CONTEXT.
        function: Does one unit.
        units: What there is to do, begun in this order.
        tick: Called after each result, and every few seconds.

    Raises:
        ChildProcessError: a worker died. What `function` raises is raised here; of several the earliest unit's.
    """
    pool = ProcessPoolExecutor(workers, CONTEXT, _start, (start, arguments))
    try:
        waiting = {pool.submit(function, unit): number for number, unit in enumerate(units)}
        while waiting:
            ended, _ = wait(waiting, TICK_SECONDS, FIRST_COMPLETED)
            for future in sorted(ended, key=lambda item: waiting[item]):
                del waiting[future]
                yield future.result()
            tick()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker process died, most likely for want of memory; give the step more, or fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
