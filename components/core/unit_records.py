"""What an interrupted run leaves behind unit by unit, and what the next one takes over.

A finished unit is its files in the output and, written after them, a record under `units/`. A record counts only
for the very same work: the key hashes whatever determines it. Records go when the manifest stands.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from crosstrain.components.core.artifact import ArtifactWriter
from crosstrain.components.core.manifest import File

FOLDER = "units"


def work_key(parts: Mapping[str, Any]) -> str:
    """Name of a piece of work: SHA-256 of what determines it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class UnitRecords:
    """Records of finished units beside an output."""

    def __init__(self, out: ArtifactWriter, key: str) -> None:
        self._out = out
        self._key = key

    def load(self, names: Collection[str], replaces: bool = True) -> dict[str, Any]:
        """Notes on the units that an earlier run of the same work finished; their files are taken over.

        Whatever else an earlier run left here is deleted, or refused where it does not replace it.

        Raises:
            ValueError: the output holds units of other work, and `replaces` is False.
        """
        found: dict[str, Any] = {}
        for entry in list(self._out.store.list(FOLDER)):
            if not entry.key.endswith(".json"):
                continue
            record = json.loads(self._out.store.read(entry.key))
            files = [File.model_validate(file) for file in record["files"]]
            if record["key"] == self._key and record["unit"] in names and self._out.adopt(files):
                found[record["unit"]] = record["note"]
                continue
            if not replaces and record["key"] != self._key:
                raise ValueError(
                    f"{self._out.store.uri}: holds unfinished output of other options or inputs; give all partitions "
                    "the same, and another output"
                )
            self._out.store.delete(entry.key)
            for file in files:
                self._out.store.delete(file.path)
        return found

    def save(self, name: str, note: Any, files: list[File]) -> None:
        """Note that a unit is finished and its files are stored."""
        record = {
            "key": self._key,
            "unit": name,
            "note": note,
            "files": [file.model_dump(mode="json") for file in files],
        }
        self._out.store.write(f"{FOLDER}/{name}.json", json.dumps(record, indent=2, sort_keys=True).encode())

    def forget(self, name: str) -> None:
        """Drop a unit's record before its files change."""
        self._out.store.delete(f"{FOLDER}/{name}.json")

    def clear(self) -> None:
        """Drop all records."""
        self._out.store.delete_prefix(FOLDER)
