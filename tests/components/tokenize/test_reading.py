"""What is read out of files: every format gives the same documents, and bad input is named or set aside."""

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import CorpusFacts, File, Manifest
from crosstrain.components.tokenize import separating
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.reading import Reader, plan_units
from crosstrain.components.tokenize.separating import BLANK_LINES
from crosstrain.components.tokenize.tally import Tally

Take = Callable[..., str]
Tokenize = Callable[..., Artifact]
Texts = Callable[[Artifact], list[str]]

DOCUMENTS = ["first text", "second\n\nwith a blank line", "naïve 日本", "last one"]


def pack(data: bytes) -> bytes:
    """Gzip without the time of day, so that every test worker collects the same parameters."""
    return gzip.compress(data, mtime=0)


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def jsonl(*texts: str) -> str:
    return lines(*({"text": text} for text in texts))


def parquet(column: pa.Array, name: str = "text", **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), sink, **options)
    return sink.getvalue()


PLAIN = jsonl(*DOCUMENTS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", PLAIN),
        ("a.jsonl", PLAIN.rstrip()),
        ("a.ndjson", b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n")),
        ("a.json", PLAIN.replace(b"\n", b"\n\n")),
        ("a.jsonl.gz", pack(PLAIN[:40]) + pack(PLAIN[40:])),
        ("a.jsonl.zst", zstandard.compress(PLAIN[:40]) + zstandard.compress(PLAIN[40:])),
        ("a.parquet", parquet(pa.array(DOCUMENTS))),
        ("a.parquet", parquet(pa.array(DOCUMENTS, pa.large_string()), row_group_size=1)),
        ("a.parquet", parquet(pa.array(DOCUMENTS).dictionary_encode())),
        ("a.parquet", parquet(pa.array([text.encode() for text in DOCUMENTS]))),
        ("a.parquet.gz", pack(parquet(pa.array(DOCUMENTS)))),
    ],
)
def test_formats_give_the_same_documents(
    take: Take, tokenize: Tokenize, texts_of: Texts, name: str, content: bytes
) -> None:
    artifact = tokenize(take({name: content}))
    assert texts_of(artifact) == DOCUMENTS
    assert artifact.facts.read == artifact.facts.documents == 4
    assert artifact.facts.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)


def test_each_text_file_is_a_document(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    files = {f"{number}.txt": text for number, text in enumerate(DOCUMENTS)}
    assert texts_of(tokenize(take(files))) == DOCUMENTS


def test_bom_and_crlf_give_the_tokens_and_hashes_of_the_clean_file(take: Take, tokenize: Tokenize) -> None:
    text = "one line\nanother line\n\nend"
    clean = tokenize(take({"a.txt": text}))
    for content in (text.replace("\n", "\r\n"), "\ufeff" + text, "\ufeff" + text.replace("\n", "\r\n")):
        dirty = tokenize(take({"a.txt": content}))
        for part in ("part-00000.bin", "part-00000.hash"):
            assert dirty.manifest.file(part) == clean.manifest.file(part)
    escaped = tokenize(take({"a.jsonl": jsonl("\ufeff" + text.replace("\n", "\r\n"))}))
    assert escaped.manifest.file("part-00000.hash") == clean.manifest.file("part-00000.hash")


def test_nulls_and_mixed_types_are_skipped_and_counted_in_either_order(
    take: Take, tokenize: Tokenize, texts_of: Texts
) -> None:
    records: list[Any] = [
        {"text": "good"}, {"text": None}, {"text": 7}, {"text": ["x"]}, {"other": "y"}, {"text": "fine", "n": {"a": 1}},
    ]  # fmt: skip
    forward, backward = tokenize(take({"a.jsonl": lines(*records)})), tokenize(take({"a.jsonl": lines(*records[::-1])}))
    assert texts_of(forward) == ["good", "fine"]
    assert texts_of(backward) == ["fine", "good"]
    for facts in (forward.facts, backward.facts):
        assert (facts.read, facts.null, facts.documents, facts.quarantined) == (6, 4, 2, 0)
    nulls = tokenize(take({"a.parquet": parquet(pa.array(["good", None, "fine", None]))}))
    assert (nulls.facts.read, nulls.facts.null) == (4, 2)
    assert texts_of(nulls) == ["good", "fine"]


def test_fields_beside_the_text_may_change_type_from_file_to_file(
    take: Take, tokenize: Tokenize, texts_of: Texts
) -> None:
    files = {"a.jsonl": lines({"text": "a", "meta": 1}), "b.jsonl": lines({"meta": {"x": [1]}, "text": "b"})}
    assert texts_of(tokenize(take(files))) == ["a", "b"]


def test_nan_in_another_field_is_no_fault(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    assert texts_of(tokenize(take({"a.jsonl": '{"score": NaN, "text": "a"}\n'}))) == ["a"]


INVALID = [
    ("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}\n', 2, "invalid UTF-8: .* at byte 14"),
    ("a.jsonl", b'{"text": "ok"}\n\n{"text": \n', 3, "broken JSON"),
    ("a.jsonl", b'{"text": "ok"}\n{"text": "\\ud800"}\n', 2, "lone surrogate in field 'text'"),
    ("a.jsonl", b'{"text": "ok"}\n"just a string"\n', 2, "a JSON object is wanted on each line, found str"),
    ("a.jsonl.gz", pack(b'{"text": "ok"}\n{"text": "caf\xe9"}\n'), 2, "invalid UTF-8"),
    ("a.json", b'[\n{"text": "no"}\n]\n', 1, "one object a line is wanted"),
    ("a.txt", b"fine\nand caf\xe9 here\n", 2, "invalid UTF-8: .* at byte 13"),
    ("a.txt", "utf-16 text".encode("utf-16"), 1, "it looks like UTF-16"),
    ("a.parquet", parquet(pa.array([b"ok", b"caf\xe9"])), 2, "invalid UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "line", "reason"), INVALID)
def test_invalid_input_is_an_error_with_file_and_line(
    take: Take, tokenize: Tokenize, name: str, content: bytes, line: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: line {line}: .*{reason}.*on_invalid=quarantine"):
        tokenize(take({name: content}))


@pytest.mark.parametrize(("name", "content", "line", "reason"), INVALID)
def test_invalid_input_is_set_aside_listed_and_counted_when_asked(
    take: Take, tokenize: Tokenize, texts_of: Texts, name: str, content: bytes, line: int, reason: str
) -> None:
    good = {"z" + Path(name).suffixes[0] + ("" if name != "a.jsonl.gz" else ".gz"): content_of_good(name)}
    artifact = tokenize(take({name: content, **good}), on_invalid="quarantine")
    facts = artifact.facts
    assert facts.quarantined >= 1
    assert facts.read == facts.documents + facts.quarantined
    assert texts_of(artifact)[-1] == "kept"
    listed = [json.loads(row) for row in artifact.read("part-00000.quarantine.jsonl").splitlines()]
    assert len(listed) == facts.quarantined
    assert (listed[0]["file"], listed[0]["line"]) == (name, line)
    assert re.search(reason, listed[0]["reason"])


def content_of_good(name: str) -> bytes:
    if name.endswith(".parquet"):
        return parquet(pa.array(["kept"]))
    if name.endswith(".txt"):
        return b"kept"
    good = jsonl("kept").encode()
    return pack(good) if name.endswith(".gz") else good


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", pack(PLAIN)[:-12]),
        ("a.jsonl.zst", zstandard.compress(PLAIN * 1000)[:-50]),
        ("a.jsonl.gz", b"not gzip at all"),
        ("a.jsonl.zst", b"not zstd at all"),
        ("a.parquet", b"PAR1 not parquet"),
    ],
)
def test_a_damaged_file_is_an_error_even_with_quarantine(
    take: Take, tokenize: Tokenize, name: str, content: bytes
) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        tokenize(take({name: content}), on_invalid="quarantine")


def test_a_corpus_file_that_changed_since_the_import_is_an_error(
    take: Take, tokenize: Tokenize, tmp_path: Path
) -> None:
    corpus = take({"a.jsonl": PLAIN})
    path = Path(corpus.removesuffix(".corpus")) / "a.jsonl"
    path.write_bytes(PLAIN.replace(b"first", b"First"))
    with pytest.raises(ValueError, match=r"a\.jsonl.*damaged or was replaced"):
        tokenize(corpus)


@pytest.mark.parametrize(
    ("column", "name", "message"),
    [
        (pa.array(["x"]), "body", "no column 'text'; set text_field to one of: id, body"),
        (pa.array([1, 2]), "text", "column 'text' holds int64, not text"),
    ],
)
def test_a_parquet_column_that_is_missing_or_no_text_is_named(
    take: Take, tokenize: Tokenize, column: pa.Array, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize(take({"a.parquet": parquet(column, name)}))


def test_the_text_field_is_chosen(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    corpus = take({"a.jsonl": lines({"text": "no", "body": "yes"})})
    assert texts_of(tokenize(corpus, text_field="body")) == ["yes"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_is_split_at_blank_lines(take: Take, tokenize: Tokenize, texts_of: Texts, newline: str) -> None:
    text = "\n\nfirst\nparagraph\n\nsecond\n \t\n\nthird\n\n".replace("\n", newline)
    artifact = tokenize(take({"a.txt": text}), split_text="blank_line")
    assert texts_of(artifact) == ["first\nparagraph", "second", "third"]
    assert artifact.facts.empty == 0


def test_text_is_split_at_a_separator(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    text = "one\n<|sep|>\ntwo\n\nlines\n<|sep|>\n<|sep|>\nthree\n<|sep|>\n"
    artifact = tokenize(take({"a.txt": text}), split_text="separator", separator="<|sep|>")
    assert texts_of(artifact) == ["one", "two\n\nlines", "three"]
    assert artifact.facts.empty == 1


def test_an_invalid_paragraph_does_not_take_its_neighbours_along(
    take: Take, tokenize: Tokenize, texts_of: Texts
) -> None:
    corpus = take({"a.txt": b"first\n\nbad \xff one\n\nthird"})
    with pytest.raises(ValueError, match=r"a\.txt: line 3: invalid UTF-8"):
        tokenize(corpus, split_text="blank_line")
    artifact = tokenize(corpus, split_text="blank_line", on_invalid="quarantine")
    assert texts_of(artifact) == ["first", "third"]
    assert artifact.facts.quarantined == 1


@given(text=st.text(alphabet="a\n\r \u00e9", max_size=60), block=st.integers(1, 9), long=st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_splitting_does_not_depend_on_how_the_file_is_read(text: str, block: int, long: int) -> None:
    def split(size: int, separator: re.Pattern[bytes], long: int = 1 << 20) -> list[tuple[int, bytes]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(separating, "_BLOCK", size)
            return [
                (line, data)
                for line, piece in separating.split_stream(io.BytesIO(text.encode()), separator, long)
                if (data := piece if isinstance(piece, bytes) else piece.read()).strip()
            ]

    for separator in (BLANK_LINES, re.compile(b"a\n\na"), re.compile(b" a")):
        assert split(block, separator) == split(1 << 20, separator) == split(block, separator, long)
    clean = text.replace("\r\n", "\n").encode()
    paragraphs = [re.sub(rb"^([ \t]*\n)+|\n+$", b"", data) for data in BLANK_LINES.split(clean)]
    assert [data for _, data in split(block, BLANK_LINES)] == [data for data in paragraphs if data.strip()]


class Files:
    """A local corpus of one file, without an import."""

    def __init__(self, folder: Path, name: str, content: bytes) -> None:
        from crosstrain.components.core.artifact import commit_manifest, hash_file
        from crosstrain.components.core.storage import open_store

        path = folder / name
        path.write_bytes(content)
        form = "parquet" if name.endswith("parquet") else "jsonl"
        self.manifest = Manifest(
            component="import_data",
            facts=CorpusFacts(format=form),  # type: ignore[arg-type]
            files=(File(path=name, bytes=len(content), sha256=hash_file(path)),),
            options={},
            inputs={},
        )
        self.artifact = commit_manifest(open_store(str(folder)), self.manifest)

    def read(self, unit_bytes: int) -> list[str]:
        config = Config(corpus="c", output="o", vocab_size=300)
        tally = Tally("error", None)
        reader = Reader(self.artifact, config)
        units = plan_units(self.manifest, unit_bytes)
        assert [unit.index for unit in units] == list(range(len(units)))
        return [text for unit in units for text in reader.documents(unit, tally)]


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=20), unit_bytes=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_units_of_any_size_find_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit_bytes: int
) -> None:
    files = Files(tmp_path_factory.mktemp("f"), "a.jsonl", jsonl(*texts).encode())
    assert files.read(unit_bytes) == texts


@given(rows=st.integers(1, 30), group=st.integers(1, 7), unit_bytes=st.integers(50, 1500))
@settings(max_examples=30, deadline=None)
def test_units_of_any_size_find_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, group: int, unit_bytes: int
) -> None:
    texts = [f"row {number} " * (number % 5) for number in range(rows)]
    files = Files(tmp_path_factory.mktemp("f"), "a.parquet", parquet(pa.array(texts), row_group_size=group))
    assert files.read(unit_bytes) == texts


def test_an_error_in_a_later_unit_names_the_line_of_the_file(take: Take, tokenize: Tokenize) -> None:
    content = jsonl(*["x" * 200] * 30) + "broken\n"
    with pytest.raises(ValueError, match=r"^a\.jsonl: line 31: broken JSON"):
        tokenize(take({"a.jsonl": content}), unit_bytes=1024)


def test_small_files_share_a_unit_in_order(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    files = {f"{number:02d}.txt": f"document {number} " * 20 for number in range(12)}
    artifact = tokenize(take(files), unit_bytes=1024)
    assert 1 < len(artifact.facts.parts) < 12
    assert texts_of(artifact) == list(files.values())
