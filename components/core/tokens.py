"""Token files: Megatron `.bin`/`.idx` pairs, written and read with numpy alone.

A pair is a flat array of ids and an index of where each document lies in it, so any sequence length is read
in O(1) and other tools (megatron-core, datatrove, OLMo-core) read the very same files. Here every document
is one sequence, and so the index's document table counts sequences. Left out on purpose: the mode bytes of
multimodal Megatron, and integrity, which is the manifest's task.

Source of the layout: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import struct
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint16] | NDArray[np.int32]

UINT16_VOCABULARY = 65_500
"""Vocabularies from here up are stored as int32: readers disagree between this and 65,536."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, type[np.uint16] | type[np.int32]] = {8: np.uint16, 4: np.int32}
_LONGEST = 2**31 - 1


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype for ids below `vocab_size`: uint16, or int32 from 65,500 up."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


class PairWriter:
    """Writes one `.bin`/`.idx` pair, batch by batch. Use as a context manager.

    The index is written when the block ends without an error; ids go to disk as they come.
    """

    def __init__(self, stem: Path, dtype: np.dtype) -> None:
        self.bin, self.idx = _paths(stem)
        self.dtype = np.dtype(dtype)
        self._lengths: list[NDArray[np.int32]] = []
        self._stream: BinaryIO = self.bin.open("wb")
        self.documents = 0
        self.tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is None:
            self._write_index()

    def write(self, ids: NDArray, lengths: NDArray) -> None:
        """Append whole documents.

        Args:
            ids: All their ids, one after the other, of any integer type; [sum of lengths].
            lengths: Ids of each document; [documents].

        Raises:
            ValueError: an id does not fit the dtype (it would wrap), or a document is longer than the index can say.
        """
        self.write_ids(ids)
        self.end_documents(lengths)

    def write_ids(self, ids: NDArray) -> None:
        """Append ids of a document that `end_documents` will close; for documents that come in pieces."""
        if ids.size:
            low = 0 if ids.dtype.kind == "u" else int(ids.min())
            high = int(ids.max())
            limit = UINT16_VOCABULARY if self.dtype == np.uint16 else 2**31
            if low < 0 or high >= limit:
                raise ValueError(f"{self.bin}: ids from {low} to {high} do not fit {self.dtype} (below {limit:,})")
        self._stream.write(np.ascontiguousarray(ids, self.dtype).data)
        self.tokens += ids.size

    def end_documents(self, lengths: NDArray) -> None:
        """Record the lengths of documents whose ids were written."""
        if lengths.size and int(lengths.max()) > _LONGEST:
            raise ValueError(
                f"{self.bin}: a document of {int(lengths.max()):,} ids; the format holds {_LONGEST:,} at most"
            )
        self._lengths.append(lengths.astype(np.int32))
        self.documents += lengths.size

    def _write_index(self) -> None:
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int32)
        assert int(lengths.sum(dtype=np.int64)) == self.tokens, "lengths of documents and ids written differ"
        pointers = np.zeros(lengths.size, np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        code = next(code for code, dtype in _CODES.items() if dtype == self.dtype)
        with self.idx.open("wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, 1, code, lengths.size, lengths.size + 1))
            lengths.tofile(stream)
            (pointers * self.dtype.itemsize).tofile(stream)
            np.arange(lengths.size + 1, dtype=np.int64).tofile(stream)


class Pair:
    """A `.bin`/`.idx` pair, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, stem: Path) -> None:
        """Map the pair at `stem`.bin and `stem`.idx.

        Raises:
            ValueError: the index is not one of ours, or the two files do not belong together.
        """
        bin_path, idx_path = _paths(stem)
        with idx_path.open("rb") as stream:
            header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ValueError(f"{idx_path}: {len(header)} bytes, too short for a Megatron index; make the tokens again")
        magic, version, code, sequences, _ = _HEADER.unpack(header)
        if magic != _MAGIC or version != 1 or code not in _CODES:
            raise ValueError(f"{idx_path}: not a Megatron index of version 1 with uint16 or int32 ids")
        self.dtype = np.dtype(_CODES[code])
        self.ids: Ids = _map(bin_path, self.dtype, 0, bin_path.stat().st_size // self.dtype.itemsize)
        """Every id of the pair; [tokens]."""
        self.lengths: NDArray[np.int32] = _map(idx_path, np.dtype(np.int32), _HEADER.size, sequences)
        """Ids of each document; [documents]."""
        self._pointers = _map(idx_path, np.dtype(np.int64), _HEADER.size + 4 * sequences, sequences)
        end = int(self._pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if end != bin_path.stat().st_size:
            raise ValueError(f"{bin_path}: its size is not what {idx_path.name} says; make the tokens again")

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, document: int) -> Ids:
        """The ids of one document."""
        start = int(self._pointers[document]) // self.dtype.itemsize
        return self.ids[start : start + int(self.lengths[document])]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins in `ids`; [documents], in memory."""
        return np.asarray(self._pointers) // self.dtype.itemsize


def _paths(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> NDArray:
    """A read-only map of `count` values, or an empty array (nothing can be mapped of an empty file)."""
    if count == 0:
        return np.empty(0, dtype)
    if path.stat().st_size < offset + count * dtype.itemsize:
        raise ValueError(f"{path}: cut short; make the tokens again")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)  # slices at less cost
