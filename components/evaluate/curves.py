"""Loss curves out of training logs: the `training_log.jsonl` that a model or an adapter brings along.

A log holds one JSON object a step: `step`, `loss` (nats/token), and on some steps `validation_loss`. Each
curve knows which shards it was trained on, so that the report draws the right unigram reference beside it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.model import LOG_NAME


@dataclass(frozen=True)
class Curve:
    """One training run's losses, nats/token."""

    name: str
    """Whose training it was: "Baseline", "Adapter"."""
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    validation_steps: tuple[int, ...]
    validation_losses: tuple[float, ...]
    trained_on: frozenset[str]
    """SHA-256 of the manifests it was made from."""


def read_curves(artifacts: Mapping[str, Artifact]) -> list[Curve]:
    """The curves of the artifacts that bring a log; a log that was handed on unchanged is read once.

    Raises:
        ValueError: a line is not a JSON object with a step and a loss.
    """
    curves: list[Curve] = []
    seen: set[str] = set()
    for name, artifact in artifacts.items():
        hashes = [file.sha256 for file in artifact.manifest.files if file.path == LOG_NAME]
        if hashes and hashes[0] not in seen:
            seen.add(hashes[0])
            curves.append(_read(name, artifact))
    return [curve for curve in curves if curve.steps]


def _read(name: str, artifact: Artifact) -> Curve:
    points: list[tuple[int, float]] = []
    held_out: list[tuple[int, float]] = []
    for number, line in enumerate(artifact.read(LOG_NAME).decode().splitlines(), start=1):
        try:
            record = json.loads(line)
            step, loss = int(record["step"]), float(record["loss"])
            validation = record.get("validation_loss")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{artifact.files.locate(LOG_NAME)}, line {number}: not a JSON object with step and loss; the artifact "
                "was made by another version: make it again"
            ) from None
        points.append((step, loss))
        if validation is not None:
            held_out.append((step, float(validation)))
    points, held_out = ([p for p in found if math.isfinite(p[1])] for found in (points, held_out))
    steps, losses = tuple(zip(*points, strict=True)) or ((), ())
    validation_steps, validation_losses = tuple(zip(*held_out, strict=True)) or ((), ())
    trained_on = frozenset(source.sha256 for source in artifact.manifest.inputs.values())
    return Curve(name, steps, losses, validation_steps, validation_losses, trained_on)
