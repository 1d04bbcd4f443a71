"""What happened to the documents of one unit: counts, and the list of those set aside."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal


@dataclass
class Counts:
    """Documents by fate, and what the good ones came to; see TokensFacts."""

    read: int = 0
    empty: int = 0
    null: int = 0
    quarantined: int = 0
    duplicates: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: "Counts") -> None:
        """Add another unit's counts."""
        for item in fields(Counts):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def drop(self, duplicates: "Counts") -> None:
        """Count documents as duplicates that were counted as good."""
        self.documents -= duplicates.documents
        self.duplicates += duplicates.documents
        self.tokens -= duplicates.tokens
        self.text_bytes -= duplicates.text_bytes

    def values(self) -> dict[str, Any]:
        """As a mapping."""
        return asdict(self)


_FIELDS = 20


class Tally:
    """Counts what a reader meets, and applies the policy for invalid documents."""

    def __init__(self, policy: Literal["error", "quarantine"], quarantine: Path | None) -> None:
        self.policy = policy
        self.read = 0
        self.null = 0
        self.empty = 0
        self.quarantined = 0
        self.fields: set[str] = set()
        """Names of fields in records that had no text, for an error message."""
        self.path = ""
        self.line = 0
        """Line or row of the file's segment that was read last, from 1."""
        self._lines_before: Callable[[], int] = lambda: 0
        self._quarantine = quarantine
        """File that lists invalid documents, made when there is one; None: they are only counted."""

    def enter(self, path: str, lines_before: Callable[[], int]) -> None:
        """Note that a segment begins; `lines_before` counts the lines ahead of it when asked."""
        self.path = path
        self.line = 0
        self._lines_before = lines_before

    def without_text(self, record: Iterable[str]) -> None:
        """Count a record whose text field is missing, null or not text."""
        self.null += 1
        if len(self.fields) < _FIELDS:
            self.fields.update(record)

    def invalid(self, reason: str) -> None:
        """Deal with the current document, which cannot be read.

        Raises:
            ValueError: the policy is to stop.
        """
        line = self.line + self._lines_before()
        if self.policy == "error":
            raise ValueError(
                f"{self.path}: line {line}: {reason}; mend it, or set on_invalid=quarantine to set such documents aside"
            )
        self.quarantined += 1
        if self._quarantine is not None:
            with self._quarantine.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"file": self.path, "line": line, "reason": reason}) + "\n")
