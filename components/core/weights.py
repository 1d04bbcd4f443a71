"""safetensors files read and written a few rows at a time, from any store, never a whole file in memory.

The `safetensors` package writes a file from tensors that are all in memory, and maps the files it reads, so
that pages once touched count as ours; merging models larger than memory needs neither. The format is a
little-endian 64-bit header length, a JSON header, and the tensors' bytes without gaps. Left out on purpose:
other weight formats; pickled `.bin` files can run code and are refused where models come in.
"""

import json
import math
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from crosstrain.components.core.storage import Store

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
          "BOOL": "bool"}  # fmt: skip
"""The format's type names, and torch's."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2,
              "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip

BLOCK_BYTES = 4 << 20
"""Most bytes handled at a time."""
ROW_MULTIPLE = 64
"""Rows are cut at multiples of this: a matrix product of so cut rows has the same bits as the whole product."""
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes lie."""

    name: str
    dtype: str
    """The format's name: "BF16"."""
    shape: tuple[int, ...]
    file: str
    """Key of the safetensors file in its store."""
    offset: int
    """First byte in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Length of the first axis; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def read_header(store: Store, key: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file's tensors in file order, and its metadata; reads the header alone.

    Raises:
        ValueError: the file is torn or no safetensors file: a short or unreadable header, bytes that are not
            as many as the header promises, gaps or overlaps.
    """
    size, where = store.stat(key).bytes, store.locate(key)
    length = int.from_bytes(store.read(key, 0, 8), "little") if size >= 8 else -1
    if not 0 < length <= min(size - 8, _HEADER_LIMIT):
        raise ValueError(f"{where}: no safetensors header ({size} bytes); the file is torn or of another format")
    try:
        header = json.loads(store.read(key, 8, length))
        metadata = header.pop("__metadata__", {})
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
        tensors = [
            Tensor(name, entry["dtype"], tuple(entry["shape"]), key, 8 + length + spans[name][0])
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        ]
        unknown = [tensor for tensor in tensors if tensor.dtype not in DTYPES]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{where}: unreadable safetensors header ({error}); fetch the file again") from None
    if unknown:
        raise ValueError(f"{where}: {unknown[0].name} has the type {unknown[0].dtype}, which is not handled")
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end or tensor.bytes != spans[tensor.name][1] - spans[tensor.name][0]:
            raise ValueError(f"{where}: {tensor.name} does not lie where its shape says; the header is damaged")
        end += tensor.bytes
    if end != size:
        raise ValueError(f"{where}: torn: {size} bytes, and its header promises {end}; fetch the file again")
    return {tensor.name: tensor for tensor in tensors}, metadata


def weight_files(store: Store) -> list[str]:
    """The safetensors files of a model folder, in order: those its index names, or `model.safetensors`.

    Raises:
        FileNotFoundError: a file that the index names is missing, or there are no safetensors weights at all.
    """
    if not store.exists(INDEX_NAME):
        if store.exists(SINGLE_NAME):
            return [SINGLE_NAME]
        raise FileNotFoundError(f"{store.uri}: neither {SINGLE_NAME} nor {INDEX_NAME} is here")
    files = sorted(set(read_index(store).values()))
    missing = [file for file in files if not store.exists(file)]
    if missing:
        raise FileNotFoundError(
            f"{store.uri}: {INDEX_NAME} names {len(files)} files and {len(missing)} of them are missing "
            f"(first: {missing[0]}); fetch the model again"
        )
    return files


def read_index(store: Store) -> dict[str, str]:
    """The index's map of tensor name to file."""
    try:
        weight_map = json.loads(store.read(INDEX_NAME))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{store.locate(INDEX_NAME)}: not an index of safetensors files ({error})") from None


def model_tensors(store: Store) -> dict[str, Tensor]:
    """Every tensor of a model folder, by file and place; headers alone are read.

    Raises:
        ValueError: a file is torn, a tensor is there twice, or the index and the files disagree.
        FileNotFoundError: a file is missing.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(store):
        found, _ = read_header(store, file)
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{store.locate(file)}: {min(twice)} is also in {tensors[min(twice)].file}")
        tensors |= found
    if store.exists(INDEX_NAME):
        index = read_index(store)
        wrong = [name for name in {*index, *tensors} if name not in tensors or index.get(name) != tensors[name].file]
        if wrong:
            raise ValueError(f"{store.uri}: {INDEX_NAME} and the files disagree on {min(wrong)}; fetch the model again")
    return tensors


def row_blocks(tensor: Tensor, row_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of a tensor's first axis of about BLOCK_BYTES each; one range where it has no rows to cut.

    Args:
        tensor: What is to be cut.
        row_bytes: Bytes to count a row with; 0: the tensor's own.
    """
    row_bytes = row_bytes or tensor.bytes // max(tensor.rows, 1)
    step = max(BLOCK_BYTES // max(row_bytes, 1) // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)
    starts = [*range(0, max(tensor.rows - step, 0) + 1, step)]
    return zip(starts, [*starts[1:], tensor.rows], strict=True)


def read_bytes(store: Store, key: str, offset: int, length: int) -> np.ndarray:
    """Bytes [offset, offset + length) of an object, as uint8 [length] that the caller owns."""
    local = store.local_path(key)
    if local is None:
        return np.frombuffer(bytearray(store.read(key, offset, length)), np.uint8)
    data = np.empty(length, np.uint8)
    with local.open("rb", buffering=0) as stream:
        stream.seek(offset)
        filled = 0
        while filled < length and (count := stream.readinto(data.data[filled:])):
            filled += count
    if filled != length:
        raise ValueError(f"{local}: ends at byte {offset + filled}, and {offset + length} are wanted; was it replaced?")
    return data


def read_rows(store: Store, tensor: Tensor, start: int, stop: int) -> "torch.Tensor":
    """Rows [start, stop) of a tensor (a scalar is one row), in its own type: [stop - start, …]."""
    import torch

    row_bytes = tensor.bytes // max(tensor.rows, 1)
    data = read_bytes(store, tensor.file, tensor.offset + start * row_bytes, (stop - start) * row_bytes)
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    dtype = getattr(torch, DTYPES[tensor.dtype])
    return torch.from_numpy(data).view(dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)


def read_tensor(store: Store, tensor: Tensor) -> "torch.Tensor":
    """A whole tensor, in its own type."""
    return read_rows(store, tensor, 0, tensor.rows)


def write_file(
    path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], blocks: Iterable[np.ndarray]
) -> None:
    """Write one safetensors file.

    Args:
        path: Local file to write.
        tensors: Names, types and shapes, in file order; where they lay before does not matter.
        metadata: The header's `__metadata__`.
        blocks: The tensors' bytes in the same order, cut anywhere, as uint8.

    Raises:
        ValueError: the blocks hold more or fewer bytes than the tensors.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    total = 0
    for tensor in tensors:
        entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [total, total + tensor.bytes]}
        header[tensor.name] = entry
        total += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for block in blocks:
            total -= len(block)
            stream.write(block.data)
    if total:
        raise ValueError(f"{path.name}: {abs(total)} bytes {'fewer' if total > 0 else 'more'} than its tensors have")


T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The same items, produced by a thread that runs up to `depth` items ahead of the consumer.

    Nested, it overlaps reading, computing and writing. An error of the producer is raised to the consumer;
    a consumer that stops early ends the producer.
    """
    results: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(result: tuple[T | None, BaseException | None, bool]) -> None:
        while not stopped.is_set():
            try:
                return results.put(result, timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put((item, None, False))
                if stopped.is_set():
                    return
            put((None, None, True))
        except BaseException as error:  # noqa: BLE001 - handed over whole, the consumer raises it
            put((None, error, True))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error, last = results.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
