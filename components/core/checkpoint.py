"""Checkpoints of a training run: saved whole or not at all, found again by the run that they belong to.

They lie under `<state>/<run key>/step-00000100/` as artifacts of kind checkpoint, written by torch.distributed's
checkpointing: each rank stores its own part of every tensor, and any number of ranks in any layout reads back what it
needs. A save copies the tensors and goes on in the background; one is in flight at most. Rank 0 writes the manifest
when all ranks have stored theirs, so that a save which was killed is no checkpoint: it is never chosen and is cleared
away by the next run. The run key is a hash of what decides the trajectory (`run_key`), so that a run with other
options or data cannot pick up a foreign state; the layout is no part of it. Left out on purpose: what the state
means, which is the loop's.
"""

import io
import logging
import pickle
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.checkpoint_files import SafeLoadPlanner, StoreReader, StoreWriter, sizes
from crosstrain.components.core.manifest import MANIFEST_NAME, CheckpointFacts, File, Source
from crosstrain.components.core.parallel.world import ALONE, World
from crosstrain.components.core.run_key import run_key as run_key
from crosstrain.components.core.storage import TEMPORARY, open_store

log = logging.getLogger(__name__)

NOTES, RANK = "notes", "rank"
_FOLDER = "step-"
"""What a checkpoint's folder begins with; the rest of a run's prefix is others'."""

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
"""One process is no fault."""


class Checkpoints:
    """The checkpoints of one run; with several ranks, every one of them makes each call."""

    def __init__(
        self,
        state_uri: str,
        key: str,
        component: str,
        options: Mapping[str, Any],
        inputs: Mapping[str, Source],
        keep: int,
        world: World = ALONE,
    ) -> None:
        """Checkpoints under `state_uri`.

        Args:
            state_uri: Prefix that may hold the checkpoints of many runs; all ranks must reach it.
            key: This run's name; see `run_key`.
            component: Recorded in manifests.
            options: Recorded in manifests.
            inputs: Recorded in manifests.
            keep: Checkpoints kept; the oldest beyond are deleted after each save.
            world: The processes that save together.
        """
        open_store(state_uri).check_writable()
        self.uri = f"{open_store(state_uri).uri}/{key}"
        self._store = open_store(self.uri)
        self._key, self._component, self._options, self._inputs = key, component, dict(options), dict(inputs)
        self._keep, self._world = keep, world
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._flight: tuple[int, ArtifactWriter, Future[Any]] | None = None
        self.stalls: list[float] = []
        """Seconds that each save held the run up: the rest of the one before, and the copy."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save in flight; when an error is on its way already, its own is only logged."""
        try:
            self.finish()
        except OSError as fault:
            if error is None:
                raise
            log.warning("%s", fault)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; waits for the one in flight."""
        self.finish()
        return self._world.share(self._complete() if self._world.first else None)

    def _complete(self) -> list[int]:
        return sorted(
            int(folder.removeprefix(_FOLDER))
            for folder, _, name in (entry.key.partition("/") for entry in self._store.list())
            if folder.startswith(_FOLDER) and name == MANIFEST_NAME
        )

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        notes: Mapping[str, Any],
        own: Mapping[str, Any],
        train_loss: float | None,
    ) -> None:
        """Store a checkpoint after `step` optimizer steps; returns when the values are copied, not stored.

        The one before is finished first. Once this one is whole, the oldest beyond those kept are deleted.

        Args:
            step: Optimizer steps done.
            tensors: This rank's; of a DTensor its part, a plain tensor of several ranks once.
            notes: The same on all ranks: nested dicts, lists, numbers and strings.
            own: This rank's alone, of the same kinds and tensors.
            train_loss: Last loss, nats a token, for the manifest.

        Raises:
            OSError: the checkpoint before this one could not be stored.
        """
        began = time.perf_counter()
        self.finish()
        facts = CheckpointFacts(step=step, run_key=self._key, train_loss=train_loss)
        state = {**tensors, NOTES: _pack(notes), f"{RANK}.{self._world.rank}": _pack(own)}
        writer = ArtifactWriter(f"{self.uri}/{_folder(step)}")

        def commit(files: list[File]) -> None:
            writer.adopt(files)
            writer.commit(self._component, facts, self._options, self._inputs)
            for old in self._complete()[: -self._keep]:
                self.delete(old)

        future: Any = dcp.async_save(
            state,
            storage_writer=StoreWriter(writer, commit),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            async_stager=self._stager,
            process_group=self._world.checkpoints,
            no_dist=self._world.size == 1,
        )
        self._flight = (step, writer, future)
        self.stalls.append(time.perf_counter() - began)

    def finish(self) -> None:
        """Wait until the save in flight, if there is one, is whole.

        Raises:
            OSError: it could not be stored.
        """
        if self._flight is None:
            return
        (step, writer, future), self._flight = self._flight, None
        with writer:
            try:
                future.result()
            except CheckpointException as error:
                raise OSError(
                    f"{self.uri}: the checkpoint of step {step} could not be stored: {_cause(error)}"
                ) from error

    def load(self, step: int, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill tensors with what was saved after `step` steps, verified against the manifest.

        Args:
            step: One of `steps()`.
            tensors: To be filled in place, in whatever layout they are.

        Returns:
            The notes, and what this rank saved of its own: None when it is one that did not save.

        Raises:
            ValueError: damaged, of another run or another model, or not loadable.
        """
        artifact = Artifact.open(f"{self.uri}/{_folder(step)}", "checkpoint")
        if artifact.facts.run_key != self._key or artifact.facts.step != step:
            raise ValueError(f"{artifact.uri}: the checkpoint of another run lies here; choose another state prefix")
        try:
            reader = StoreReader(artifact)
            found = sizes(reader.read_metadata())
            mine = f"{RANK}.{self._world.rank}"
            packed = {name: torch.empty(found[name], dtype=torch.uint8) for name in (NOTES, mine) if name in found}
            dcp.load(
                {**tensors, **packed},
                storage_reader=reader,
                planner=SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._world.checkpoints,
                no_dist=self._world.size == 1,
            )
            unpacked = {name: _unpack(item) for name, item in packed.items()}
        except (CheckpointException, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{artifact.uri}: the checkpoint does not load ({_cause(error)}); delete it to go on without"
            ) from None
        return unpacked[NOTES], unpacked.get(mine)

    def clear_torn(self) -> None:
        """Delete what saves that were cut short left behind; rank 0 does it, the others wait."""
        if self._world.first:
            self._clear_torn()
        self._world.wait()

    def _clear_torn(self) -> None:
        complete = {_folder(step) for step in self._complete()}
        found = {entry.key.partition("/")[0] for entry in self._store.list()}
        for folder in sorted(name for name in found - complete if name.startswith(_FOLDER)):
            log.warning("%s/%s: a save was cut short here; clearing it away", self.uri, folder)
            self._store.delete_prefix(folder)
        if (local := self._store.local_path()) is not None:
            for path in local.glob(f"*/{TEMPORARY}*"):
                log.warning("%s: left by a save that was cut short; clearing it away", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def delete(self, step: int) -> None:
        """Delete one checkpoint; it stops existing before its objects go."""
        self._store.delete(f"{_folder(step)}/{MANIFEST_NAME}")
        self._store.delete_prefix(_folder(step))


def _folder(step: int) -> str:
    return f"{_FOLDER}{step:08d}"


def _pack(values: Mapping[str, Any]) -> torch.Tensor:
    """Plain values and tensors as bytes, [n] uint8, so that a checkpoint holds tensors alone."""
    stream = io.BytesIO()
    torch.save(dict(values), stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    return values


def _cause(error: BaseException) -> str:
    """The first rank's own error out of what checkpointing wraps it in."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return " ".join(str(error).split())[:300]
