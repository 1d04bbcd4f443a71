"""A corpus is taken in where it lies, whole, and one clear error says what cannot be taken."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config
from crosstrain.components.core.storage import open_store


def run(source: str, output: Path, **options: Any) -> Result:
    config = load_config("import_data").decode({"source": source, "output": str(output), **options})
    return execute("import_data", config)


def fill(folder: Path, *names: str, content: bytes = b'{"text": "x"}\n') -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_every_file_is_listed_by_reference_with_size_and_hash(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", "b.jsonl", "a/é c+d.jsonl.gz", "part-10.ndjson", "part-9.json")
    fill(folder, ".hidden.jsonl", "_SUCCESS", ".git/x.jsonl", "a/_tmp/y.jsonl")
    result = run(str(folder), tmp_path / "out")
    manifest = result.artifact.manifest
    assert [file.path for file in manifest.files] == ["a/é c+d.jsonl.gz", "b.jsonl", "part-10.ndjson", "part-9.json"]
    assert {(file.bytes, file.sha256) for file in manifest.files} == {
        (14, hashlib.sha256(b'{"text": "x"}\n').hexdigest())
    }
    assert manifest.facts.format == "jsonl"
    assert manifest.base == str(folder)
    assert result.metrics == {"files": 4, "input_bytes": 56}
    reopened = Artifact.open(str(tmp_path / "out"), "corpus")
    assert reopened.fetch("b.jsonl") == folder / "b.jsonl"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "run.json"]


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", "a.jsonl", "other.parquet")
    for source in (str(folder / "a.jsonl"), f"file://{folder}/a.jsonl"):
        manifest = run(source, tmp_path / "out").artifact.manifest
        assert ([file.path for file in manifest.files], manifest.base) == (["a.jsonl"], str(folder))


def test_a_relative_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "in", "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert run("in/", tmp_path / "out").artifact.manifest.base == str(tmp_path / "in")
    monkeypatch.chdir(tmp_path / "in")
    assert run("a.jsonl", tmp_path / "out").artifact.manifest.base == str(tmp_path / "in")


def test_object_storage_is_imported_like_a_folder(tmp_path: Path, s3_uri: str) -> None:
    store = open_store(s3_uri)
    store.write("data/a b+c.txt", b"one")
    store.write("data/sub/ü.md.zst", b"two")
    store.write("data/_temporary/x.txt", b"no")
    for source in (f"{s3_uri}/data", f"{s3_uri}/data/"):
        manifest = run(source, tmp_path / "out").artifact.manifest
        assert ([file.path for file in manifest.files], manifest.base) == (
            ["a b+c.txt", "sub/ü.md.zst"],
            f"{s3_uri}/data",
        )
        assert manifest.files[0].sha256 == hashlib.sha256(b"one").hexdigest()
        assert manifest.facts.format == "text"
    single = run(f"{s3_uri}/data/a b+c.txt", tmp_path / "out").artifact
    assert single.fetch("a b+c.txt").read_bytes() == b"one"
    with pytest.raises(FileNotFoundError, match="no file and no prefix"):
        run(f"{s3_uri}/nothing", tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["a.jsonl", "b.json", "c.ndjson.zst", "D.JSONL.GZ"], "jsonl"),
        (["a.parquet"], "parquet"),
        (["a.txt", "b.md", "c.rst.gz", "d.text"], "text"),
    ],
)
def test_the_format_is_told_from_the_names(tmp_path: Path, names: list[str], form: str) -> None:
    assert run(str(fill(tmp_path / "in", *names)), tmp_path / "out").artifact.facts.format == form


def test_include_and_format_choose_among_mixed_files(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", "a.jsonl", "sub/b.jsonl", "README.md", "script.py", "LICENSE")
    chosen = run(str(folder), tmp_path / "out", include="*.jsonl").artifact.manifest
    assert [file.path for file in chosen.files] == ["a.jsonl", "sub/b.jsonl"]
    code = run(str(folder), tmp_path / "code", include="*.py", format="text").artifact.manifest
    assert ([file.path for file in code.files], code.facts.format) == (["script.py"], "text")


def test_empty_files_are_left_out(tmp_path: Path) -> None:
    folder = fill(fill(tmp_path / "in", "a.jsonl"), "b.jsonl", content=b"")
    assert [file.path for file in run(str(folder), tmp_path / "out").artifact.manifest.files] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("names", "content", "options", "message"),
    [
        ([], b"", {}, "no file and no prefix with files"),
        ([".hidden"], b"x", {}, "no file and no prefix with files"),
        (["a.jsonl", "b.jsonl"], b"", {}, "2 files, all of them empty"),
        (["a.jsonl", "b.parquet"], b"x", {}, r"mixed formats \(jsonl: 1 files such as 'a.jsonl'; parquet: 1 files"),
        (["a.jsonl", "b.csv"], b"x", {}, r"b\.csv: cannot tell the format.*set format, or leave the file out"),
        (["a.jsonl"], b"x", {"include": "*.txt"}, r"none of 1 files matches include='\*\.txt'; one is 'a\.jsonl'"),
        (["a.jsonl"], b"x", {"format": "csv"}, "format"),
    ],
)
def test_what_cannot_be_taken_is_named(
    tmp_path: Path, names: list[str], content: bytes, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(str(fill(tmp_path / "in", *names, content=content)), tmp_path / "out", **options)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_output_inside_the_source_or_without_permission_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", "a.jsonl")
    for output in (folder, folder / "out"):
        with pytest.raises(ValueError, match="inside the source folder"):
            run(str(folder), output)
    with pytest.raises(PermissionError, match="cannot write the output here"):
        run(str(folder), folder / "a.jsonl" / "out")


def test_importing_again_after_a_change_gives_another_manifest(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in", "a.jsonl")
    first = run(str(folder), tmp_path / "out").artifact.manifest
    assert run(str(folder), tmp_path / "out").artifact.manifest.sha256 == first.sha256
    fill(folder, "a.jsonl", content=b'{"text": "y"}\n')
    assert run(str(folder), tmp_path / "out").artifact.manifest.sha256 != first.sha256
    assert re.fullmatch("[0-9a-f]{64}", first.sha256)


def test_the_same_files_at_another_place_are_the_same_corpus(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("text")
    here, there = (run(str(tmp_path / name), tmp_path / f"{name}.out").artifact for name in ("here", "there"))
    assert here.manifest.base != there.manifest.base
    assert here.manifest.sha256 == there.manifest.sha256
