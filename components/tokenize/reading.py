"""Documents out of a corpus: units of work, and the text of every record in them.

A unit is planned from file sizes alone, so that any worker finds the same documents in it. Large JSONL and
Parquet files are cut into byte ranges; a record belongs to the range it begins in. Nothing is decoded leniently:
what is not valid goes to the caller's policy, with file and line.
"""

import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import Manifest
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.pages import largest_page
from crosstrain.components.tokenize.separating import BLANK_LINES, split_stream
from crosstrain.components.tokenize.spooling import LONG, LongLine, LongText, spool_file
from crosstrain.components.tokenize.tally import Tally

_BLOCK = 1 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_ROWS = 256
"""Rows of a Parquet file read at once, at most; as many as _BATCH bytes hold if each is a page of its own."""
_BATCH = 16 << 20
_PAGE = 32 << 20
"""Bytes of the largest Parquet page that is read; Arrow and we need several times as much for it."""


@dataclass(frozen=True)
class Segment:
    """The records of a file that begin in its bytes [begin, end)."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Unit:
    """What one worker does in one go, and what becomes one part."""

    index: int
    segments: tuple[Segment, ...]

    @property
    def stem(self) -> str:
        return f"part-{self.index:05d}"


def plan_units(manifest: Manifest, unit_bytes: int) -> list[Unit]:
    """Cut a corpus into units of about `unit_bytes`, in the order of its files; a function of the manifest alone."""
    groups: list[list[Segment]] = [[]]
    room = unit_bytes
    for file in manifest.files:
        cuttable = manifest.facts.kind == "corpus" and manifest.facts.format != "text" and not _compression(file.path)
        step = unit_bytes if cuttable else max(file.bytes, 1)
        for begin in range(0, file.bytes, step):
            end = min(begin + step, file.bytes)
            if groups[-1] and end - begin > room:
                groups.append([])
                room = unit_bytes
            groups[-1].append(Segment(file.path, begin, end))
            room -= end - begin
    return [Unit(index, tuple(group)) for index, group in enumerate(groups) if group]


class Reader:
    """Reads documents out of one corpus; one to a process."""

    def __init__(self, corpus: Artifact, config: Config) -> None:
        self._corpus = corpus
        self._config = config
        self._held = ""
        self._in_lines = corpus.facts.format == "jsonl"
        self._read = {"jsonl": self._json_lines, "parquet": self._parquet, "text": self._text}[corpus.facts.format]

    def documents(self, unit: Unit, tally: Tally) -> Iterator[str | LongText]:
        """The documents of a unit in order, as they are; the tally always knows where the last one came from.

        A long one is on disk, and gone when the next is asked for.

        Raises:
            ValueError: a file is damaged, or a document is invalid and the policy is to stop.
        """
        for segment in unit.segments:
            path = self._fetch(segment)
            tally.enter(segment.path, partial(_lines_before, path, segment.begin if self._in_lines else 0))
            try:
                yield from self._read(path, segment, tally)
            except (OSError, EOFError) as error:
                raise ValueError(f"{self._corpus.files.locate(segment.path)}: cannot be read: {error}") from error

    def _fetch(self, segment: Segment) -> Path:
        """The file on local disk. A local file is verified by the one segment that holds its first byte."""
        if self._held not in ("", segment.path):
            self._corpus.release(self._held)
        self._held = segment.path
        local = self._corpus.files.local_path(segment.path)
        return local if local is not None and segment.begin else self._corpus.fetch(segment.path)

    def _json_lines(self, path: Path, segment: Segment, tally: Tally) -> Iterator[str | LongText]:
        field = self._config.text_field
        with _open(path) as stream:
            for line in _lines(stream, segment, compressed=bool(_compression(segment.path))):
                tally.line += 1
                if not isinstance(line, bytes):
                    yield from self._long_line(line, tally)
                    continue
                if line.isspace():
                    continue
                tally.read += 1
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    try:
                        record = _patient_json(line)
                    except (ValueError, RecursionError) as error:
                        tally.invalid(_reason(error, line))
                        continue
                if not isinstance(record, dict):
                    tally.invalid(f"a JSON object is wanted on each line, found {type(record).__name__}")
                elif isinstance(text := record.get(field), str):
                    if text.isascii() or _encodable(text):
                        yield text
                    else:
                        tally.invalid(f"lone surrogate in field {field!r}, which is no Unicode text")
                else:
                    tally.without_text(record)

    def _long_line(self, line: LongLine, tally: Tally) -> Iterator[LongText | str]:
        """The document of a line that is taken apart on disk."""
        tally.read += 1
        try:
            rest, texts = line.spool()
            try:
                record = _patient_json(rest)
                if not isinstance(record, dict):
                    tally.invalid(f"a JSON object is wanted on each line, found {type(record).__name__}")
                    return
                text = record.get(self._config.text_field)
                if not isinstance(text, str):
                    tally.without_text(record)
                elif text not in texts:
                    yield text
                elif texts[text].surrogates:
                    tally.invalid(f"lone surrogate in field {self._config.text_field!r}, which is no Unicode text")
                else:
                    yield texts[text]
            finally:
                for long in texts.values():
                    long.close()
        except (ValueError, RecursionError) as error:
            tally.invalid(_reason(error, b""))

    def _parquet(self, path: Path, segment: Segment, tally: Tally) -> Iterator[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        field = self._config.text_field
        with tempfile.TemporaryFile() as plain:
            source: Any = path
            if _compression(segment.path):
                with _open(path) as stream:
                    shutil.copyfileobj(stream, plain, _BLOCK)
                source = plain
            try:
                file = pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False)  # else it holds whole chunks
            except pa.ArrowInvalid as error:
                raise ValueError(f"{self._corpus.files.locate(segment.path)}: not a Parquet file ({error})") from None
            columns = {column.name: column.type for column in file.schema_arrow}
            if field not in columns:
                raise ValueError(
                    f"{self._corpus.files.locate(segment.path)}: no column {field!r}; set text_field to one of: "
                    f"{', '.join(columns)}"
                )
            if not _is_text(columns[field]):
                raise ValueError(
                    f"{self._corpus.files.locate(segment.path)}: column {field!r} holds {columns[field]}, not text"
                )
            with path.open("rb") if source is path else plain as pages:
                for group, first_row in _row_groups(file.metadata, segment, cut=source is path):
                    tally.line = first_row
                    rows = self._rows_at_once(file.metadata, group, cast(BinaryIO, pages), segment.path)
                    for batch in file.iter_batches(rows, row_groups=[group], columns=[field], use_threads=False):
                        yield from self._rows(batch.column(0), tally)

    def _rows_at_once(self, metadata: Any, group: int, pages: BinaryIO, path: str) -> int:
        """How many rows of a row group fit into memory together; ValueError when one page may not."""
        field = self._config.text_field
        facts = metadata.row_group(group)
        (chunk,) = (c for c in map(facts.column, range(facts.num_columns)) if c.path_in_schema == field)
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        try:
            largest = largest_page(pages, begin, begin + chunk.total_compressed_size)
        except ValueError as error:
            raise ValueError(f"{self._corpus.files.locate(path)}: damaged in row group {group}: {error}") from None
        if largest > _PAGE:
            raise ValueError(
                f"{self._corpus.files.locate(path)}: row group {group} has a page of {largest / 1e6:.0f} MB in column "
                f"{field!r}, and one of more than {_PAGE / 1e6:.0f} MB does not fit into a worker's memory; write this "
                "file as JSONL, where a document may be of any size, or with fewer rows a page"
            )
        return max(1, min(_ROWS, _BATCH // max(largest, 1)))

    def _rows(self, column: Any, tally: Tally) -> Iterator[str]:
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        for value in column.cast(pa.large_binary()).to_pylist():
            tally.line += 1
            tally.read += 1
            if value is None:
                tally.null += 1
            else:
                yield from _decoded(value, tally, 0)

    def _text(self, path: Path, segment: Segment, tally: Tally) -> Iterator[str | LongText]:
        with _open(path) as stream:
            if self._config.split_text == "file":
                tally.read += 1
                start = stream.read(LONG)
                yield from _decoded(start, tally, 1) if len(start) < LONG else _spooled(start, stream, tally)
                return
            separator = re.compile(re.escape(self._config.separator.encode()))
            keep_empty = self._config.split_text == "separator"
            for line, data in split_stream(stream, separator if keep_empty else BLANK_LINES, LONG):
                tally.line = line
                if not isinstance(data, bytes):
                    tally.read += 1
                    yield from _spooled(data.read(LONG), cast(BinaryIO, data), tally)
                elif data.strip() or keep_empty:
                    tally.read += 1
                    yield from _decoded(data, tally, 1)


def _decoded(data: bytes, tally: Tally, first_line: int) -> Iterator[str]:
    """The text of UTF-8 bytes, or nothing when the policy sets it aside; `first_line` 0: lines within do not count."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = tally.line
        if first_line:
            tally.line += first_line + data.count(b"\n", 0, error.start)
        tally.invalid(_reason(error, data))
        tally.line = before
        return
    yield text


def _spooled(start: bytes, stream: BinaryIO, tally: Tally) -> Iterator[LongText]:
    """The text of a file that is too large for memory, or nothing when the policy sets it aside."""
    try:
        text = spool_file(start, stream)
    except UnicodeDecodeError as error:
        tally.line += 1 + len(error.object)
        tally.invalid(_reason(error, start))
        return
    try:
        yield text
    finally:
        text.close()


def _lines(stream: BinaryIO, segment: Segment, compressed: bool) -> Iterator[bytes | LongLine]:
    """The lines that begin in the segment; all lines of a compressed file, whose bytes are not the text's."""
    position = 0 if compressed else segment.begin
    if position:
        stream.seek(position - 1)
        position -= 1
        while part := stream.readline(LONG):
            position += len(part)
            if part.endswith(b"\n"):
                break
    while compressed or position < segment.end:
        line = stream.readline(LONG)
        if not line:
            return
        if len(line) < LONG or line.endswith(b"\n"):
            position += len(line)
            yield line
        else:
            long = LongLine(line, stream)
            del line
            yield long
            position += long.size


def _row_groups(metadata: Any, segment: Segment, cut: bool) -> Iterator[tuple[int, int]]:
    """Row groups that begin in the segment (all, unless the file is cut), with the rows before each."""
    row = 0
    for group in range(metadata.num_row_groups):
        facts = metadata.row_group(group)
        chunks = [facts.column(i) for i in range(facts.num_columns)]
        begin = min(c.dictionary_page_offset or c.data_page_offset for c in chunks)
        if not cut or segment.begin <= begin < segment.end:
            yield group, row
        row += facts.num_rows


def _open(path: Path) -> BinaryIO:
    """A file's content, decompressed; a file that was cut short raises OSError (zstandard's reader would not)."""
    compression = _compression(path.name)
    if compression is None:
        return path.open("rb", buffering=_BLOCK)
    import pyarrow as pa

    return io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.OSFile(str(path)), compression)), _BLOCK)


def _compression(name: str) -> str | None:
    return next((kind for suffix, kind in _COMPRESSIONS.items() if name.lower().endswith(suffix)), None)


def _patient_json(line: bytes) -> Any:
    """A line that orjson refuses and that may still be good: a byte order mark, NaN, lone surrogates elsewhere."""
    return json.loads(line.decode("utf-8-sig"))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    return any(test(kind) for test in (*tests, pa.types.is_large_binary, pa.types.is_null))


def _reason(error: Exception, data: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        hint = "; it looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        return f"invalid UTF-8: {error.reason} at byte {error.start + 1}{hint}"
    if data.lstrip()[:1] == b"[":
        return "broken JSON: this looks like one JSON array, and one object a line is wanted (jq -c '.[]' converts it)"
    return f"broken JSON: {error}" if str(error) else f"broken JSON: {type(error).__name__}"


def _lines_before(path: Path, begin: int) -> int:
    """Lines before the first one that starts at or after byte `begin`; only asked for to name a line."""
    if not begin:
        return 0
    count, left = 1, begin - 1
    with path.open("rb") as stream:
        while left and (block := stream.read(min(_BLOCK, left))):
            count += block.count(b"\n")
            left -= len(block)
    return count
