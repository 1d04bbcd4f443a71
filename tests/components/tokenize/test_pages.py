"""Parquet files whose pages are too large for memory: found from their headers, refused in time, all others read."""

import io
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.tokenize import reading
from crosstrain.components.tokenize.pages import largest_page

LIMIT = 512 << 20


def _chunk(data: bytes) -> tuple[int, int, int]:
    """Where the first column chunk of a file begins and ends, and its bytes uncompressed."""
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    return begin, begin + chunk.total_compressed_size, chunk.total_uncompressed_size


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=300)), min_size=1, max_size=60),
    compression=st.sampled_from(["none", "snappy", "gzip", "brotli", "lz4", "zstd"]),
    version=st.sampled_from(["1.0", "2.0"]),
    dictionary=st.booleans(),
    index=st.booleans(),
    checksum=st.booleans(),
)
def test_the_headers_of_whatever_pyarrow_writes_are_read(texts, compression, version, dictionary, index, checksum):
    """With a page for each row, no page is smaller than the longest text nor larger than the chunk."""
    stream = io.BytesIO()
    pq.write_table(
        pa.table({"text": pa.array(texts, pa.string())}),
        stream,
        **{"compression": compression, "data_page_version": version, "use_dictionary": dictionary},
        **{"write_page_index": index, "write_page_checksum": checksum, "data_page_size": 1, "write_batch_size": 1},
    )
    begin, end, whole = _chunk(stream.getvalue())
    longest = max(len((text or "").encode()) for text in texts)
    assert longest <= largest_page(stream, begin, end) <= whole


def test_the_largest_page_is_exact():
    stream = io.BytesIO()
    texts = ["x" * 1000, "y" * 5000, "z" * 2000]
    options = {"compression": "zstd", "use_dictionary": False, "data_page_size": 1, "write_batch_size": 1}
    pq.write_table(pa.table({"text": texts}), stream, **options)
    begin, end, _ = _chunk(stream.getvalue())
    assert 5000 < largest_page(stream, begin, end) < 5000 + 32


def test_fields_of_later_formats_are_passed_over():
    unknown = (
        bytes([0x19, 0xF5, 16, *range(1, 17)]),  # a list of 16 integers
        bytes([0x1B, 1, 0x88, 1, 97, 1, 98, 0x1B, 0]),  # a map of one text to another, and an empty one
        bytes([0x17, *bytes(8), 0x1A, 0x13, 1, 0x11]),  # a double, a set of one byte, a flag
        bytes([0x1C, 0x15, 2, 0, 0x05, 0x50, 2]),  # a structure, and a field that names its number
    )
    pages = []
    for size, more in ((5000, b"".join(unknown)), (6000, b"")):
        low, high = size * 2 & 127 | 128, size * 2 >> 7
        pages.append(bytes([0x15, 0, 0x15, low, high, 0x15, 20]) + more + bytes(1) + b"ten bytes.")
    data = b"".join(pages)
    assert largest_page(io.BytesIO(data), 0, len(data)) == 6000


@pytest.mark.parametrize("data", [b"", b"\x15", b"\x00", b"\xff" * 40, b"\x1c" * 99, b"\x15\x00\x15\x01\x15\x00\x00"])
def test_what_is_no_header_is_refused(data):
    with pytest.raises(ValueError, match="page"):
        largest_page(io.BytesIO(data), 0, 99)


def test_a_page_too_large_is_refused_before_it_is_read(monkeypatch, take, tokenize):
    monkeypatch.setattr(reading, "_PAGE", 4000)
    stream = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2], "text": ["short", "x" * 5000]}), stream, row_group_size=1)
    corpus = take({"a.parquet": stream.getvalue()})
    for policy in ("error", "quarantine"):
        with pytest.raises(ValueError, match=r"a\.parquet: row group 1 has a page of .*'text'.* as JSONL"):
            tokenize(corpus, on_invalid=policy)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [400, 1, 0])
def test_memory_is_bounded_whatever_the_cells(tmp_path, plain_tokenizer, cells):
    """One cell of 206 MB is refused; 400 cells of a MB in one column chunk, or one as large as may be, are read."""
    words = "The quick brown fox jumps over 1234 lazy dogs. " * 21_277
    texts = {400: [f"{words}{i}" for i in range(400)], 1: [words * 206], 0: [(words * 32)[: 32 * 1_000_000]]}[cells]
    (tmp_path / "source").mkdir()
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 1}
    pq.write_table(pa.table({"text": texts}), tmp_path / "source" / "a.parquet", **options)
    text_bytes = sum(len(text) for text in texts)
    del texts
    code = (
        "from crosstrain.components.core.telemetry import peak_rss_bytes\n"
        "from crosstrain.components.core.step import execute, load_config\n"
        f"corpus = dict(source={str(tmp_path / 'source')!r}, output={str(tmp_path / 'corpus')!r})\n"
        "execute('import_data', load_config('import_data').decode(corpus))\n"
        f"values = dict(corpus={str(tmp_path / 'corpus')!r}, output={str(tmp_path / 'out')!r},"
        f" tokenizer_uri={str(plain_tokenizer)!r}, workers=1)\n"
        "try:\n"
        "    print(execute('tokenize', load_config('tokenize').decode(values)).artifact.facts.text_bytes)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(peak_rss_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, peak = done.stdout.splitlines()
    assert int(peak) < LIMIT, f"{int(peak) / 2**20:.0f} MiB"
    if cells == 1:
        assert "a page of 206 MB" in said
    else:
        assert int(said) == text_bytes
