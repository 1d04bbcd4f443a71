"""The runs of a study: read from their artifacts, paired by seed, and refused where they cannot be compared."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.model import LOG_NAME
from crosstrain.components.core.step import RECORD_NAME

Study = Literal["fp8", "lora"]

DIGITS = 6
"""Decimals of a loss; everything is computed from the losses as they are shown."""

_FP8 = "fp8_"
"""How the options of fp8 begin, and the columns of a training log that tell what fp8 does to the numbers."""

_FULL = "finetune_full"
"""Component whose models are told by how they were tuned."""

_SAME_IN_LORA = ("steps", "global_batch_size", "micro_batch_size", "evaluate_batches")


@dataclass(frozen=True)
class Run:
    """One finished training run."""

    artifact: Artifact
    seed: int
    label: str
    """What ran, as its manifest calls it: bf16, fp8-torchao-emulated, lora, finetune_full."""
    loss: float
    """Held-out loss after the last step, nats a token, to DIGITS decimals."""
    curve: tuple[tuple[int, float], ...]
    """Step and training loss."""
    numerics: dict[str, float]
    """The largest value that each of fp8's columns takes in the log; empty where it has none."""
    trained: int
    """Parameters that were trained."""
    metrics: dict[str, float]
    """What the run measured of itself; no part of its identity."""
    platform: str

    @property
    def emulated(self) -> bool:
        return "emulated" in self.label

    @property
    def seconds(self) -> float | None:
        """Time of training, from tokens and tokens a second, so that it holds of a resumed run, too."""
        rate = self.metrics.get("tokens_per_second")
        return self.artifact.facts.tokens_seen / rate if rate else None


@dataclass(frozen=True)
class Pair:
    """Two runs of one seed."""

    control: Run
    candidate: Run

    @property
    def gap(self) -> float:
        """Nats a token."""
        return self.candidate.loss - self.control.loss

    @property
    def percent(self) -> float:
        """The gap in percent of the control's loss."""
        return 100 * self.gap / self.control.loss


def read_pairs(control: Sequence[Artifact], candidate: Sequence[Artifact], study: Study) -> list[Pair]:
    """Read both arms and pair their runs, by rising seed.

    Raises:
        ValueError: an arm lacks a seed of the other or has one twice, there is only one seed, runs differ in more
            than the study is about, or a log has no held-out loss.
    """
    arms = [_by_seed([read_run(artifact) for artifact in artifacts]) for artifacts in (control, candidate)]
    if lacking := sorted(set(arms[0]) ^ set(arms[1])):
        raise ValueError(f"seed {lacking[0]}: only one of the two arms has it; give both arms the same seeds")
    if len(arms[0]) < 2:
        raise ValueError("one seed gives no interval; run each arm with at least two, better five or more")
    pairs = [Pair(arms[0][seed], arms[1][seed]) for seed in sorted(arms[0])]
    first = pairs[0].control
    for pair in pairs:
        for run, like in ((pair.control, pairs[0].control), (pair.candidate, pairs[0].candidate)):
            _check_like(run, like, "all")
            if run.artifact.manifest.inputs != first.artifact.manifest.inputs:
                raise ValueError(f"{run.artifact.uri}: trained on other data than {first.artifact.uri}")
        _check_like(pair.candidate, pair.control, study)
    return pairs


def read_run(artifact: Artifact) -> Run:
    """One run, from its artifact, its training log and its record."""
    facts, rows = artifact.facts, _rows(artifact)
    held_out = rows[-1].get("validation_loss")
    if held_out is None or not math.isfinite(held_out):
        raise ValueError(
            f"{artifact.files.locate(LOG_NAME)}: no held-out loss after the last step; put text into the validation "
            "split (shard.validation_fraction)"
        )
    numerics: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_FP8) and isinstance(value, int | float):
                numerics[name] = max(numerics.get(name, -math.inf), float(value))
    try:
        record = json.loads(artifact.store.read(RECORD_NAME))
    except FileNotFoundError:
        record = {"metrics": {}, "platform": ""}
    is_adapter = facts.kind == "adapter"
    return Run(
        artifact=artifact,
        seed=int(artifact.manifest.options["seed"]),
        label=facts.method if is_adapter else _FULL if artifact.manifest.component == _FULL else facts.precision,
        loss=round(float(held_out), DIGITS),
        curve=tuple((int(row["step"]), float(row["loss"])) for row in rows),
        numerics=numerics,
        trained=facts.trainable_parameters if is_adapter else facts.parameters,
        metrics=record["metrics"],
        platform=record["platform"],
    )


def _rows(artifact: Artifact) -> list[dict[str, Any]]:
    if artifact.manifest.kind not in ("model", "adapter"):
        raise ValueError(
            f"{artifact.uri}: this is a {artifact.manifest.kind} artifact; give trained models or adapters"
        )
    if LOG_NAME not in artifact.manifest.by_path:
        raise ValueError(f"{artifact.uri}: has no {LOG_NAME}; give what train_fp8 or fine-tuning wrote")
    rows = [json.loads(line) for line in artifact.read(LOG_NAME).decode().splitlines()]
    if not rows:
        raise ValueError(f"{artifact.files.locate(LOG_NAME)}: empty; no step had a label to learn from")
    return rows


def _by_seed(runs: Sequence[Run]) -> dict[int, Run]:
    found: dict[int, Run] = {}
    for run in runs:
        if run.seed in found:
            raise ValueError(f"{run.artifact.uri}: seed {run.seed} is in its arm twice; give each seed once")
        found[run.seed] = run
    return found


def _check_like(run: Run, like: Run, study: Study | Literal["all"]) -> None:
    """Refuse runs that differ in what they must not."""
    ours, theirs = run.artifact.manifest.options, like.artifact.manifest.options
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if study == "all":
        if run.label != like.label:
            raise ValueError(f"{run.artifact.uri}: ran as {run.label}, and another run of its arm as {like.label}")
        names = [name for name in names if name != "seed"]
    elif study == "fp8":
        names = [name for name in names if name != "precision" and not name.startswith(_FP8)]
    else:
        names = [name for name in names if name in _SAME_IN_LORA]
    if names:
        name = names[0]
        raise ValueError(
            f"{run.artifact.uri}: differs from {like.artifact.uri} in {name} ({ours.get(name)!r} and "
            f"{theirs.get(name)!r}), which must be the same"
        )
