"""What lies under a prefix: every artifact, what each was made from, and whether its bytes are still what they were.

A manifest names its inputs by SHA-256 and not by place, so that moving a folder breaks nothing; who made what is
found by reading every manifest under a prefix. Left out on purpose: how it is shown, which is show's.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import MANIFEST_NAME, File
from crosstrain.components.core.step import RECORD_NAME
from crosstrain.components.core.storage import open_store


@dataclass(frozen=True)
class Found:
    """One artifact, and what is told of the step that made it."""

    artifact: Artifact
    number: int
    """Its place in the order: an artifact comes after those that it was made from."""
    sources: dict[str, int | None]
    """Input name to the artifact's number; None: it does not lie where was looked."""
    record: dict[str, Any] = field(default_factory=dict)
    """The step's run.json; empty when it is not there."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.artifact.manifest.files)


def collect(uris: Sequence[str]) -> list[Found]:
    """Every artifact under some prefixes, checkpoints left out unless a prefix is one; inputs before outputs.

    Args:
        uris: Folders or prefixes.

    Raises:
        FileNotFoundError: nothing there is an artifact.
        ValueError: a manifest does not decode.
    """
    places = dict.fromkeys(place for uri in uris for place in _places(uri))
    artifacts = [Artifact.open(place) for place in places]
    roots = {uri.rstrip("/") for uri in uris}
    chosen = [one for one in artifacts if one.manifest.kind != "checkpoint" or one.uri in roots]
    if not chosen:
        raise FileNotFoundError(f"{', '.join(uris)}: no artifact here: no folder under it holds a {MANIFEST_NAME}")
    ordered = _order(chosen)
    numbers = {one.manifest.sha256: number for number, one in reversed(list(enumerate(ordered, 1)))}
    return [
        Found(
            artifact,
            number,
            {name: numbers.get(source.sha256) for name, source in artifact.manifest.inputs.items()},
            _record(artifact),
        )
        for number, artifact in enumerate(ordered, 1)
    ]


def damaged(found: Found) -> Iterator[tuple[File, str]]:
    """Read an artifact's objects one after the other; each with what is wrong with it, "" when nothing is."""
    artifact = found.artifact
    for file in artifact.manifest.files:
        try:
            entry = artifact.files.digest(file.path)
        except FileNotFoundError:
            yield file, "missing"
            continue
        if entry.bytes != file.bytes:
            yield file, f"{entry.bytes} bytes, and the manifest says {file.bytes}"
        elif entry.sha256 != file.sha256:
            yield file, f"SHA-256 {entry.sha256[:12]}…, and the manifest says {file.sha256[:12]}…"
        else:
            yield file, ""


def _places(uri: str) -> Iterator[str]:
    store = open_store(uri.removesuffix("/" + MANIFEST_NAME))
    for entry in store.list():
        folder, _, name = entry.key.rpartition("/")
        if name == MANIFEST_NAME:
            yield store.locate(folder)


def _order(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """Inputs before outputs, else as they were met."""
    makers: dict[str, list[Artifact]] = {}
    for one in artifacts:
        makers.setdefault(one.manifest.sha256, []).append(one)
    ordered: dict[str, Artifact] = {}

    def visit(artifact: Artifact) -> None:
        if artifact.uri in ordered:
            return
        for source in artifact.manifest.inputs.values():
            for maker in makers.get(source.sha256, ()):
                visit(maker)
        ordered[artifact.uri] = artifact

    for one in artifacts:
        visit(one)
    return list(ordered.values())


def _record(artifact: Artifact) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(artifact.store.read(RECORD_NAME))
    except FileNotFoundError:
        return {}
    return record
