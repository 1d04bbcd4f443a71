"""Who failed first, read from what torchrun prints, and that rank's last lines.

torchrun ends with a table whose "Root Cause" names the first rank of its node that failed and when; every
worker's line carries the prefix of `plan.LOG_PREFIX`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

TAIL_LINES = 20
"""Lines of the failing rank that an error carries."""

_ROOT_CAUSE = re.compile(
    r"Root Cause.*?time\s+: (?P<time>\S+).*?rank\s+: (?P<rank>\d+) .*?exitcode\s+: (?P<code>-?\d+)", re.DOTALL
)
_PREFIX = re.compile(r"\[rank(\d+)\]: ?")


@dataclass(frozen=True)
class RootCause:
    """The first rank of a node that failed."""

    rank: int
    code: int
    """Its exit status; negative: killed by that signal."""
    time: float
    """When, in seconds since the epoch, by the node's clock in UTC; whole seconds."""


def root_cause(lines: Sequence[str]) -> RootCause | None:
    """What torchrun's last table of failures says, if there is one."""
    tables = list(_ROOT_CAUSE.finditer("\n".join(lines)))
    if not tables:
        return None
    found = tables[-1]
    moment = datetime.strptime(found["time"], "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC)
    return RootCause(int(found["rank"]), int(found["code"]), moment.timestamp())


def split_rank(line: str) -> tuple[int | None, str]:
    """A line's rank, None for the launcher's own, and the line without the prefix."""
    if found := _PREFIX.match(line):
        return int(found[1]), line[found.end() :]
    return None, line


def tail(lines: Sequence[str], rank: int | None) -> tuple[str, ...]:
    """The last lines of a rank; those of everyone if it printed none or is not known."""
    parted = [split_rank(line) for line in lines]
    own = [text for of, text in parted if of == rank and rank is not None and text.strip()]
    return tuple((own or [line for line in lines if line.strip()])[-TAIL_LINES:])
