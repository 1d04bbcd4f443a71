"""How torch.distributed's checkpointing meets a Store: each rank's files staged, hashed, uploaded, read verified.

torch keeps the plan of a checkpoint as a pickle, and reads whatever is no tensor with a free unpickler: neither is
done here. The plan is loaded by the safe unpickler, which knows the plan's own classes and nothing else, and a
checkpoint holds tensors alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import File

PLAN_NAME = "plan.pt"
"""What tensors there are and in which file each part of them lies."""

_PLAN_CLASSES: list[Any] = [
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
]


@dataclass
class _Stored(_StorageInfo):
    """Where a part lies, with the manifest's entry for that file: on its way to rank 0."""

    file: File | None = None


class StoreWriter(FileSystemWriter):
    """Writes one rank's parts to files and stores them; rank 0 then stores the plan and commits."""

    def __init__(self, writer: ArtifactWriter, commit: Callable[[list[File]], None]) -> None:
        """A writer for one save.

        Args:
            writer: Of this rank, on the checkpoint's prefix.
            commit: Called on rank 0 with the files of all ranks when they lie there.
        """
        super().__init__(writer.staging, sync_files=False)
        self._writer, self._commit = writer, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: self._writer.add(self._writer.staging / name, name) for name in names}
        done: Future[list[WriteResult]] = Future()
        done.set_result([_with_file(result, files[result.storage_data.relative_path]) for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = [result for rank in results for result in rank]
        metadata.storage_data = {
            part.index: _StorageInfo(
                part.storage_data.relative_path, part.storage_data.offset, part.storage_data.length
            )
            for part in parts
        }
        metadata.storage_meta = None
        with self._writer.create(PLAN_NAME) as path:
            torch.save(metadata, path)
        files = {part.storage_data.file.path: part.storage_data.file for part in parts}
        self._commit(list(files.values()))


def _with_file(result: WriteResult, file: File) -> WriteResult:
    at = result.storage_data
    return replace(result, storage_data=_Stored(at.relative_path, at.offset, at.length, file=file))


class StoreReader(FileSystemReader):
    """Reads a checkpoint artifact: only the files that this rank needs parts of, each verified first."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        super().__init__(artifact.fetch(PLAN_NAME).parent)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with torch.serialization.safe_globals(_PLAN_CLASSES):
            plan: Metadata = torch.load(self._artifact.fetch(PLAN_NAME), weights_only=True)
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
            self._artifact.fetch(name)
        return super().read_data(plan, planner)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads tensors, and refuses anything that would be unpickled freely."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn}: the checkpoint holds an object that is no tensor")


def sizes(plan: Metadata) -> dict[str, torch.Size]:
    """Name to full size of every tensor in a checkpoint."""
    return {name: item.size for name, item in plan.state_dict_metadata.items() if hasattr(item, "size")}
