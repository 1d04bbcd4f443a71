"""What a check found before anything was spent: one line each, told all at once.

A check never stops at its first fault, and what it could not look at is a finding, too: silence means that it
looked and found nothing wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "not checked"]
LEVELS: tuple[Level, ...] = ("error", "warning", "not checked")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, doubtful or unknown."""

    level: Level
    where: str
    """What it is about: "storage s3://lake/runs", "train_fp8 memory"."""
    what: str
    """What is so; for `not checked` why it was not."""
    advice: str = ""
    """What to do."""

    @property
    def line(self) -> str:
        """The finding on one line."""
        text = " ".join(f"{self.level}: {self.where}: {self.what}".split())
        return f"{text}; {self.advice}" if self.advice else text


def error(where: str, what: object, advice: str = "") -> Finding:
    """The run would fail."""
    return Finding("error", where, str(what), advice)


def warning(where: str, what: object, advice: str = "") -> Finding:
    """The run may fail, or not do what was meant."""
    return Finding("warning", where, str(what), advice)


def not_checked(where: str, why: object, advice: str = "") -> Finding:
    """Nobody looked."""
    return Finding("not checked", where, str(why), advice)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, each once, otherwise as they were found."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def count(findings: Iterable[Finding]) -> dict[Level, int]:
    """How many of each level."""
    levels = [finding.level for finding in findings]
    return {level: levels.count(level) for level in LEVELS}


def summary(findings: Iterable[Finding]) -> str:
    """`2 errors, 1 warning, 3 not checked`."""
    counted = count(findings)
    plural = {"error": "errors", "warning": "warnings", "not checked": "not checked"}
    return ", ".join(f"{number} {level if number == 1 else plural[level]}" for level, number in counted.items())
