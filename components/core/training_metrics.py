"""A run's numbers in the store, step by step, for people and their tools: JSON lines, and TensorBoard's event files.

They lie beside the checkpoints, under `metrics/` and `tensorboard/`, one object for the steps between two checkpoints:
object stores cannot append, and so what a resumed run writes goes on where its checkpoint stands. What an earlier
start wrote of later steps is deleted, so that every step is there once. Rows hold times and speeds, and so are
no part of any artifact; `training_log.jsonl` is. The first rank writes. Left out on purpose: any tracking service.
"""

import json
import logging
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from crosstrain.components.core.flops import Flops, device_peak
from crosstrain.components.core.parallel.world import World
from crosstrain.components.core.precision import Precision
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.core.training_config import TrainingOptions

log = logging.getLogger(__name__)

LINES, EVENTS = "metrics/{}.jsonl", "tensorboard/events.out.tfevents.{}"
"""Keys of a segment, whose name is its first and last step."""
_NO_SCALARS = ("step", "time")

Row = dict[str, Any]


class Metrics:
    """The rows of one run, written when its checkpoints are."""

    def __init__(
        self, uri: str, model: Any, options: TrainingOptions, precision: Precision, device: torch.device, world: World
    ) -> None:
        """Nothing is written yet.

        Args:
            uri: Prefix of the run's state.
            model: Whole, as it is trained.
            options: The run's.
            precision: Its format; an emulated one has no MFU.
            device: Where this rank computes.
            world: The processes that train together, on devices of one kind.

        Raises:
            ValueError: TensorBoard's files are wanted, and its package is not installed.
        """
        if options.tensorboard and find_spec("tensorboard") is None:
            raise ValueError("tensorboard: its package is not installed; `pip install tensorboard`, or leave it off")
        self._store, self._options, self._device, self._world = open_store(uri), options, device, world
        self._speed_name, self._flops = precision.speed_name, Flops.of(model)
        self._peak = None if precision.emulated else device_peak(device, options.device_peak_tflops)
        self._rows: list[Row] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left; when an error is on its way already, a failure to is only logged."""
        try:
            self.flush()
        except OSError as fault:
            if error is None:
                raise
            log.warning("%s", fault)

    def add(self, row: Row, tokens: int, seconds: float) -> Row:
        """Keep one step's row, with what it took.

        Args:
            row: As the training log has it.
            tokens: Of the whole global batch.
            seconds: The step's.

        Returns:
            Speed and, where it is known, MFU, by name.
        """
        speed = tokens / seconds
        took: Row = {self._speed_name: speed}
        if self._peak is not None:
            length = tokens / self._options.global_batch_size
            took["mfu"] = speed * self._flops.per_token(length) / (self._peak * self._world.size)
        memory = {"peak_rss_bytes": peak_rss_bytes()}
        if self._device.type == "cuda":
            memory["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._device)
        if self._world.first:
            self._rows.append({**row, **took, **memory, "time": time.time()})
        return took

    def flush(self) -> None:
        """Write the rows since the last time as a segment.

        Raises:
            OSError: the store does not take them.
        """
        if not self._rows:
            return
        segment = f"{self._rows[0]['step']:08d}-{self._rows[-1]['step']:08d}"
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self._rows)
        self._store.write(LINES.format(segment), lines.encode())
        if self._options.tensorboard:
            self._store.write(EVENTS.format(segment), _events(self._rows))
        self._rows = []

    def forget(self, step: int) -> None:
        """Drop what is known of the steps after `step`: they are done again."""
        if not self._world.first:
            return
        self._rows = [row for row in self._rows if row["step"] <= step]
        for prefix in (LINES, EVENTS):
            for entry in list(self._store.list(prefix.partition("/")[0] + "/")):
                first = entry.key.rpartition("/")[2].removeprefix("events.out.tfevents.").partition("-")[0]
                if int(first) > step:
                    self._store.delete(entry.key)


def _events(rows: list[Row]) -> bytes:
    """A TensorBoard event file of some rows: a scalar for each of their numbers."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for row in rows:
                for name in row.keys() - _NO_SCALARS:
                    writer.add_scalar(name, row[name], row["step"], walltime=row["time"])
        (file,) = Path(folder).iterdir()
        return file.read_bytes()
