"""Showing a run: a table kept up to date on a terminal, plain lines elsewhere, and the table at the end."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crosstrain.pipelines.progress import Progress, Step

KEY_METRICS = (
    "passed", "equivalent", "gap_percent", "gap_percent_low", "gap_percent_high", "improvement", "candidate_loss",
    "baseline_loss", "validation_loss", "unigram_entropy", "train_loss", "loss", "grad_norm",
    "max_abs_logit_difference", "documents", "tokens", "train_samples", "validation_samples", "parameters",
    "trainable_parameters", "tokens_per_second", "emulation_tokens_per_second", "files", "input_bytes",
)  # fmt: skip
"""Metrics worth a place on a step's line, the most telling first; a step that has none of them shows its own first."""

SHOWN_METRICS = 5
PLAIN_SECONDS = 10.0
"""Between two progress lines of one step where there is no terminal."""

_MARKS = {"pending": "·", "running": "▸", "done": "✓", "reused": "✓", "failed": "✗", "stopped": "■", "skipped": "-"}
_STYLES = {"running": "bold", "done": "green", "reused": "green", "failed": "bold red", "stopped": "yellow"}


class Display(Protocol):
    """Where progress is shown; a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, step: Step) -> None:
        """Take note that a step changed."""

    def tick(self) -> None:
        """Called a few times a second."""


class PlainDisplay:
    """Lines for logs and files: when a step starts, when it ends, and now and then between."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, step: Step) -> None:
        """Print a line if the step's state is new, or if its last line is old."""
        status, when = self._shown.get(step.task, ("", 0.0))
        now = time.monotonic()
        if step.status == status:
            if not step.progress or now - when < PLAIN_SECONDS:
                return
            text = progress_text(step)
        elif step.status == "running":
            text = "started"
        else:
            text = f"{step.status} in {duration(step.seconds)}  {metrics_text(step)}"
        self._shown[step.task] = (step.status, now)
        print(f"{time.strftime('%H:%M:%S')}  {step.title}: {text}".rstrip(), flush=True)

    def tick(self) -> None:
        return None


class LiveDisplay:
    """A table on a terminal, one line a step."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, step: Step) -> None:
        return None

    def tick(self) -> None:
        """Draw the present state."""
        table = Table.grid(padding=(0, 2))
        for step in self._progress.ordered():
            elapsed = duration(step.seconds) if step.started else ""
            text = progress_text(step) if step.status == "running" else metrics_text(step)
            style = _STYLES.get(step.status, "dim")
            table.add_row(Text(f"{_MARKS[step.status]} {step.title}", style), Text(elapsed), Text(text, "dim"))
        self._live.update(table, refresh=True)


def print_table(progress: Progress, console: Console) -> None:
    """The table that a run ends with."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("step", "status", "time", "peak memory", "metrics"):
        table.add_column(heading, justify="right" if heading in ("time", "peak memory") else "left")
    for step in progress.ordered():
        table.add_row(
            step.title,
            Text(step.status, _STYLES.get(step.status, "dim")),
            duration(step.seconds) if step.started else "",
            size(step.peak_rss_bytes) if step.peak_rss_bytes else "",
            metrics_text(step),
        )
    console.print(table)


def progress_text(step: Step) -> str:
    """`step 12/200  loss 5.12  …`; empty before the first training step."""
    values = dict(step.progress)
    if "step" not in values:
        return ""
    done, total = int(values.pop("step")), int(values.pop("total"))
    return "  ".join([f"step {done}/{total}", *_pairs(values)])


def metrics_text(step: Step) -> str:
    """The step's most telling metrics."""
    return "  ".join(_pairs(step.metrics))


def _pairs(values: Mapping[str, float]) -> list[str]:
    names = [name for name in KEY_METRICS if name in values] or list(values)
    return [f"{name.replace('_', ' ')} {number(values[name])}" for name in names[:SHOWN_METRICS]]


def number(value: float) -> str:
    """Four significant digits, or a whole number with separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def size(count: float) -> str:
    """Bytes in binary units: `812 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
