"""One pod's log, line by line, over broken connections and container restarts, no line twice.

Lines come with the kubelet's timestamps. A new connection asks for those since the last one's second, and skips
what was seen: everything older, and as many lines of the very same nanosecond as were printed.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from crosstrain.components.core.launch import failure
from crosstrain.components.core.launch.cluster import BROKEN, Cluster, Refused, pauses

log = logging.getLogger(__name__)

KEPT_LINES = 2_000
IDLE_SECONDS = 60.0
"""Silence after which the connection is made anew, because a dead one is silent, too."""
DRAIN_SECONDS = 15.0
"""How long the last lines are waited for at the end."""


_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class LogFollower:
    """Follows the log of the node that `follow` last named, until `finish`."""

    def __init__(self, cluster: Cluster, container: str, processes: int, show: Callable[[str], None]) -> None:
        self._cluster, self._container, self._processes, self._show = cluster, container, processes, show
        self._pod, self._start = "", 0
        self._last, self._at_last = "", 0
        self._wake, self._done = threading.Event(), threading.Event()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of every rank on the node."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="log")
        self._thread.start()

    def follow(self, pod: str, start: int) -> None:
        """Follow this pod, whose container starts for the `start`-th time; nothing changes if it is being followed."""
        if (pod, start) != (self._pod, self._start):
            self._pod, self._start = pod, start
            self._wake.set()

    def finish(self) -> None:
        """Read what is still to come, for a bounded time, and end; a second call returns at once."""
        if not self._done.is_set():
            self._done.set()
            self._wake.set()
            self._thread.join(DRAIN_SECONDS)

    def _run(self) -> None:
        followed, waits = "", pauses()
        while not (self._done.is_set() and not self._pod):
            pod = self._pod
            if pod != followed:
                followed, self._last, self._at_last = pod, "", 0
            ending = self._done.is_set()
            try:
                if pod and self._read(pod, follow=not ending):
                    waits = pauses()
            except PermissionError as error:
                log.warning("no logs: %s", error)
                return
            except (Refused, *BROKEN):  # not started yet, gone, or cut off: tried again while there is a job
                if ending:
                    return
            if ending:
                return
            self._wake.wait(next(waits))
            self._wake.clear()

    def _read(self, pod: str, follow: bool) -> bool:
        """Print the lines that are new; whether there were any."""
        query = {"container": self._container, "timestamps": "true", **({"follow": "true"} if follow else {})}
        if self._last:
            query["sinceTime"] = f"{self._last[:19]}Z"
        to_skip, before = self._at_last, self._last
        for line in self._cluster.log(pod, query, IDLE_SECONDS):
            stamp, _, text = line.partition(" ")
            moment = sortable(stamp)
            if moment < before or not moment:  # seen, or the kubelet's own words
                continue
            if moment == before and to_skip:
                to_skip -= 1
                continue
            self._at_last = self._at_last + 1 if moment == self._last else 1
            self._last = moment
            self._print(text)
            if pod != self._pod:
                break
        return self._last != before

    def _print(self, line: str) -> None:
        """Keep a line, and show it if it is of the node's first rank or of the launcher itself."""
        self.lines.append(line)
        rank, text = failure.split_rank(line)
        if rank is None or rank % self._processes == 0:
            self._show(text)


def sortable(stamp: str) -> str:
    """An RFC 3339 time as 2026-01-02T03:04:05.000000006, in UTC, so that text sorts as time; empty for other text."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return ""
    moment = datetime.fromisoformat(found[1] + found[3]).astimezone(UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{found[2] or '':0<9}"
