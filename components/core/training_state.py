"""What the training loop takes, keeps and gives: data sets, progress, outcome."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from crosstrain.components.core.data import Sample
from crosstrain.components.core.telemetry import peak_rss_bytes


class Dataset(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass
class Progress:
    """How far a run is; all of it goes into checkpoints."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens seen, padding not counted."""
    unlabelled_steps: int = 0
    """Steps whose global batch held no label: no update, no row in the history."""
    high_until: int = 0
    """Steps up to this one run in the fallback precision."""
    kept_out: list[str] = field(default_factory=list)
    """Modules that alone do; none: all."""
    skipped: list[int] = field(default_factory=list)
    """Global batches, in the order of the data, that are left out; ascending."""
    recovered_at: int = 0
    """Step that ends the last replay or skip, when it is reached; 0: there was none."""
    retries: int = 0
    """Fallbacks and skips taken."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row a step, as training_log.jsonl holds them: step, loss, grad_norm, learning_rate, tokens and,
    where one was taken, validation_loss."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Decisions of the guard, in order."""


@dataclass(frozen=True)
class Outcome:
    """What a finished run tells."""

    history: list[dict[str, Any]]
    steps: int
    tokens: int
    unlabelled_steps: int
    guard_events: tuple[dict[str, Any], ...]
    seconds: float
    """Time this process trained, validation and checkpoints left out."""
    tokens_per_second: float
    """Of this process, without its first step; 0 when it trained fewer than two."""
    resumed_from: int
    """Step of the checkpoint this process began at; 0: from the start."""
    tokens_resumed: int
    """Of `tokens`, those seen before that checkpoint."""
    compile_seconds: float
    """Of `seconds`, what compiling took, as far as the first step tells."""
    stalls: tuple[float, ...]
    """Seconds that each checkpoint held the run up."""
    weights: Callable[[], Iterator[tuple[str, torch.Tensor | None]]]
    """The trained parameters, whole, one at a time: tensors on rank 0, None elsewhere. In several processes every
    rank must iterate."""

    @property
    def train_loss(self) -> float | None:
        """Loss of the last step that had labels, nats a token."""
        return self.history[-1]["loss"] if self.history else None

    @property
    def validation_loss(self) -> float | None:
        """Last validation loss, nats a token."""
        return next((row["validation_loss"] for row in reversed(self.history) if "validation_loss" in row), None)

    def metrics(self, speed_name: str = "tokens_per_second") -> dict[str, float]:
        """What every component that trains tells of it, by name; a loss or speed that there is none of is left out.

        Args:
            speed_name: Name of the throughput: see Precision.speed_name.
        """
        told = {
            "tokens_seen": self.tokens,
            "tokens_resumed": self.tokens_resumed,
            "training_seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "train_loss": self.train_loss,
            "validation_loss": self.validation_loss,
            speed_name: self.tokens_per_second or None,
        }
        return {name: value for name, value in told.items() if value is not None}

    def hand_over_weights(self) -> None:
        """On a rank that writes nothing: take its part in gathering the weights that rank 0 iterates over."""
        for _ in self.weights():
            continue

    def log_lines(self) -> str:
        """The history as training_log.jsonl holds it; bit-reproducible."""
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.history)
