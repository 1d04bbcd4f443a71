"""How a job's life parts into queueing, running and restarting, by the cluster's own times.

Nodes that wait cost what nodes that compute cost, so the cost report needs the parts apart. A step that attaches
to a job it did not start counts from what the pods still know.
"""


class Clock:
    """Parts of a life in seconds, told by observations that come in order."""

    def __init__(self, created: float) -> None:
        self._mark = created
        self.phase = "queued"
        """queued until every node ran once; then running or restarting."""
        self.parts = {"queued": 0.0, "running": 0.0, "restarting": 0.0}
        self.restarts = 0

    @property
    def mark(self) -> float:
        """When the present phase began, in seconds since the epoch."""
        return self._mark

    def running(self, since: float) -> None:
        """Every node runs since then."""
        if self.phase != "running":
            self.restarts += self.phase == "restarting"
            self._turn("running", since)

    def broken(self, since: float) -> None:
        """Not every node runs any more, since then."""
        if self.phase == "running":
            self._turn("restarting", since)

    def end(self, at: float) -> None:
        """The job ended."""
        self._turn("ended", at)

    def _turn(self, phase: str, at: float) -> None:
        if self.phase in self.parts:
            at = max(at, self._mark)
            self.parts[self.phase] += at - self._mark
            self._mark, self.phase = at, phase
