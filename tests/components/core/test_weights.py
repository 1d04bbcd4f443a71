"""safetensors read and written in pieces: the library reads what is written, and is read back to the byte."""

import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from crosstrain.components.core import weights
from crosstrain.components.core.storage import Store

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    found = {f"t.{dtype}": (torch.arange(30).reshape(5, 6) - 7).to(dtype) for dtype in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "vector": torch.arange(4.0)}


def test_reads_what_the_library_wrote(store: Store, tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    store.upload(tmp_path / "x", "x.safetensors")
    found, metadata = weights.read_header(store, "x.safetensors")
    assert metadata == {"format": "pt"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(weights.read_tensor(store, found[name]), tensor), name
    assert torch.equal(weights.read_rows(store, found["vector"], 1, 3), torch.tensor([1.0, 2.0]))


def test_the_library_reads_what_is_written(store: Store, tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "x")
    store.upload(tmp_path / "x", "x")
    found, _ = weights.read_header(store, "x")
    blocks = (
        weights.read_bytes(store, t.file, t.offset + at, min(7, t.bytes - at))
        for t in found.values()
        for at in range(0, t.bytes, 7)
    )
    weights.write_file(tmp_path / "y", list(found.values()), {"format": "pt"}, blocks)
    again = load_file(tmp_path / "y")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "y", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("given", [3, 5])
def test_a_wrong_number_of_bytes_is_an_error(tmp_path, given) -> None:
    tensor = weights.Tensor("t", "U8", (4,), "f", 0)
    with pytest.raises(ValueError, match="1 bytes fewer" if given < 4 else "1 bytes more"):
        weights.write_file(tmp_path / "f", [tensor], {}, [np.zeros(given, np.uint8)])


def test_rows_are_cut_at_multiples_and_cover_all() -> None:
    for rows in (1, 63, 64, 65, 1000, 4096, 5000):
        blocks = list(weights.row_blocks(weights.Tensor("t", "F32", (rows, 1 << 14), "f", 0)))
        assert blocks[0][0] == 0
        assert blocks[-1][1] == rows
        assert all(stop == begin for (_, stop), (begin, _) in itertools.pairwise(blocks))
        assert all(start % weights.ROW_MULTIPLE == 0 for start, _ in blocks)
        assert all(stop - start >= weights.ROW_MULTIPLE for start, stop in blocks if len(blocks) > 1)


def test_producing_ahead_keeps_order_errors_and_ends_with_its_consumer() -> None:
    assert list(weights.ahead(weights.ahead(range(100)))) == list(range(100))

    def fails() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    produced = weights.ahead(fails())
    assert next(produced) == 1
    with pytest.raises(ValueError, match="broken"):
        next(produced)

    endless = weights.ahead(iter(int, 1))
    next(endless)
    endless.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if "produce" in thread.name]
