"""What an interrupted run leaves behind, and what the next one takes over.

A finished unit is a part in the output and, written after it, a record under `units/`. A record counts only for
the very same work: the run key hashes options, corpus, tokenizer and encoder. Records go when the manifest stands.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from crosstrain.components.core.artifact import ArtifactWriter
from crosstrain.components.core.manifest import File
from crosstrain.components.tokenize.reading import Unit
from crosstrain.components.tokenize.tally import Counts

FOLDER = "units"


def run_key(parts: Mapping[str, Any]) -> str:
    """Name of a piece of work: SHA-256 of what determines it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Records:
    """Records of finished units beside an output."""

    def __init__(self, out: ArtifactWriter, key: str) -> None:
        self._out = out
        self._key = key

    def load(self, units: list[Unit], replaces: bool = True) -> dict[int, Counts]:
        """Counts of the units that an earlier run of the same work finished; their files are taken over.

        Whatever else an earlier run left here is deleted, or refused where it does not replace it.

        Raises:
            ValueError: the output holds parts of other work, and `replaces` is False.
        """
        found: dict[int, Counts] = {}
        for entry in list(self._out.store.list(FOLDER)):
            if not entry.key.endswith(".json"):
                continue
            record = json.loads(self._out.store.read(entry.key))
            files = [File.model_validate(file) for file in record["files"]]
            if record["key"] == self._key and self._out.adopt(files):
                found[record["unit"]] = Counts(**record["counts"])
                continue
            if not replaces and record["key"] != self._key:
                raise ValueError(
                    f"{self._out.store.uri}: holds unfinished tokens of other options, corpus or tokenizer; give all "
                    "partitions the same, and another output"
                )
            self._out.store.delete(entry.key)
            for file in files:
                self._out.store.delete(file.path)
        return {unit.index: found[unit.index] for unit in units if unit.index in found}

    def save(self, unit: Unit, counts: Counts, files: list[File]) -> None:
        """Note that a unit is finished and its files are stored."""
        record = {
            "key": self._key,
            "unit": unit.index,
            "counts": counts.values(),
            "files": [file.model_dump(mode="json") for file in files],
        }
        self._out.store.write(self._name(unit), json.dumps(record, indent=2, sort_keys=True).encode())

    def forget(self, unit: Unit) -> None:
        """Drop a unit's record before its files change."""
        self._out.store.delete(self._name(unit))

    def clear(self) -> None:
        """Drop all records."""
        self._out.store.delete_prefix(FOLDER)

    def _name(self, unit: Unit) -> str:
        return f"{FOLDER}/{unit.stem}.json"
