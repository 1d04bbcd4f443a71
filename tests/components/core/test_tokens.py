"""Token pairs: what is written is read back, by us and by others, and nothing wraps or passes unnoticed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.tokens import Pair, PairWriter, token_dtype

documents_of = st.lists(st.lists(st.integers(0, 65_499), max_size=20), max_size=30)

READ_WITH_MEGATRON = """
import sys, numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
for stem in sys.argv[1:]:
    found = IndexedDataset(stem)
    np.savez(stem + ".megatron", *[found[i] for i in range(len(found))], table=found.document_indices)
"""

READ_WITH_DATATROVE = """
import sys, numpy as np
from datatrove.utils.dataset import DatatroveFileDataset
for stem in sys.argv[1:]:
    found = DatatroveFileDataset(stem + ".bin", seq_len=7, token_size=2 if stem.endswith("uint16") else 4)
    np.savez(stem + ".datatrove", *[found[i]["input_ids"].numpy() for i in range(len(found))])
"""


def write(stem: Path, documents: list[list[int]], dtype: str = "uint16", batch: int = 3) -> Pair:
    with PairWriter(stem, np.dtype(dtype)) as writer:
        for begin in range(0, len(documents), batch):
            some = documents[begin : begin + batch]
            writer.write(np.array([i for ids in some for i in ids], np.int64), np.array([len(ids) for ids in some]))
    return Pair(stem)


@given(documents=documents_of, dtype=st.sampled_from(["uint16", "int32"]), batch=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_documents_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str, batch: int
) -> None:
    pair = write(tmp_path_factory.mktemp("pair") / "p", documents, dtype, batch)
    assert [pair[i].tolist() for i in range(len(pair))] == documents
    assert pair.lengths.sum() == pair.ids.size == sum(map(len, documents))
    assert pair.starts.tolist() == [sum(map(len, documents[:i])) for i in range(len(documents))]


def test_a_document_may_come_in_pieces(tmp_path: Path) -> None:
    with PairWriter(tmp_path / "p", np.dtype(np.uint16)) as writer:
        writer.write_ids(np.array([1, 2]))
        writer.write_ids(np.array([3]))
        writer.end_documents(np.array([3]))
    assert Pair(tmp_path / "p")[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (100_278, "int32")])
def test_large_vocabularies_take_four_bytes(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype


@pytest.mark.parametrize("ids", [[1, 65_536], [65_500], [-1]])
def test_an_id_that_would_wrap_is_refused(tmp_path: Path, ids: list[int]) -> None:
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        PairWriter(tmp_path / "p", np.dtype(np.uint16)) as writer,
    ):
        writer.write(np.array(ids), np.array([len(ids)]))
    assert not (tmp_path / "p.idx").exists()


def test_ids_above_65536_come_back(tmp_path: Path) -> None:
    assert write(tmp_path / "p", [[70_000, 5], [100_277]], "int32")[1].tolist() == [100_277]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "p", [[1, 2, 3], [4]])
    good = (tmp_path / "p.idx").read_bytes()
    for data in (good[:10], b"X" + good[1:], good[:-30]):
        (tmp_path / "p.idx").write_bytes(data)
        with pytest.raises(ValueError, match=r"p\.idx"):
            Pair(tmp_path / "p").lengths.sum()
    (tmp_path / "p.idx").write_bytes(good)
    (tmp_path / "p.bin").write_bytes(b"\x01\x00")
    with pytest.raises(ValueError, match=r"p\.bin: its size"):
        Pair(tmp_path / "p")


@pytest.mark.slow
def test_megatron_and_datatrove_read_the_same_files(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 65_000, size).tolist() for size in (5, 1, 40, 3, 0, 12)]
    stream = [i for ids in documents for i in ids]
    stems = [str(tmp_path / dtype) for dtype in ("uint16", "int32")]
    for stem in stems:
        write(Path(stem), documents, Path(stem).name)
    for script in (READ_WITH_MEGATRON, READ_WITH_DATATROVE):
        subprocess.run([sys.executable, "-W", "ignore", "-c", script, *stems], check=True, timeout=120)
    for stem in stems:
        megatron, datatrove = np.load(f"{stem}.megatron.npz"), np.load(f"{stem}.datatrove.npz")
        assert [megatron[f"arr_{i}"].tolist() for i in range(len(documents))] == documents
        assert megatron["arr_0"].dtype == Path(stem).name
        assert megatron["table"].tolist() == list(range(len(documents) + 1))
        assert [datatrove[f"arr_{i}"].tolist() for i in range(len(datatrove.files))] == [
            stream[begin : begin + 8] for begin in range(0, len(stream) - 7, 8)
        ]
