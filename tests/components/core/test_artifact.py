"""Artifacts on a local folder and on a real S3 server: verified when read, absent until committed."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact, ArtifactWriter, commit_manifest
from crosstrain.components.core.manifest import CorpusFacts, File, Manifest
from crosstrain.components.core.storage import LocalStore, Store, open_store

FILES = {"a.jsonl": b'{"text": "a"}\n' * 1000, "folder/b +ü.jsonl": b"", "folder.not": b"x"}


def write(uri: str, files: dict[str, bytes] = FILES) -> Artifact:
    with ArtifactWriter(uri) as out:
        for path, data in files.items():
            with out.create(path) as local:
                local.write_bytes(data)
        return out.commit("import_data", CorpusFacts(format="jsonl"), {"field": "text"}, {})


def names(uri: str) -> list[str]:
    """Everything under a prefix, temporary files of a local folder included."""
    local = open_store(uri).local_path()
    if local is None:
        return [entry.key for entry in open_store(uri).list()]
    return sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file())


def test_what_was_written_is_read_and_verified(store_uri: str) -> None:
    written = write(store_uri)
    for uri in (store_uri, store_uri + "/", store_uri + "/manifest.json"):
        artifact = Artifact.open(uri, "corpus")
        assert artifact.manifest == written.manifest
        for path, data in FILES.items():
            assert artifact.read(path) == artifact.fetch(path).read_bytes() == data
    assert names(store_uri) == sorted([*FILES, "manifest.json"])


def test_local_and_s3_give_the_same_manifest(s3_uri: str, tmp_path: Path) -> None:
    assert write(s3_uri).manifest.encode() == write(str(tmp_path / "local")).manifest.encode()
    assert open_store(s3_uri).read("manifest.json") == (tmp_path / "local" / "manifest.json").read_bytes()


def test_order_of_writing_does_not_matter(store_uri: str) -> None:
    first = write(f"{store_uri}/1")
    second = write(f"{store_uri}/2", dict(reversed(FILES.items())))
    assert first.manifest.sha256 == second.manifest.sha256
    assert hashlib.sha256(open_store(f"{store_uri}/1").read("manifest.json")).hexdigest() == first.manifest.sha256


def test_files_of_elsewhere_are_copied_and_staged_ones_are_moved(store_uri: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("x", "y"):
        (tmp_path / "kept" / name).write_text(name)
    with ArtifactWriter(store_uri) as out:
        (out.staging / "staged").write_text("staged")
        out.add(out.staging / "staged", "staged")
        assert list(path for path in out.staging.rglob("*") if path.is_file()) == []
        out.add_folder(tmp_path / "kept", "copies/")
        artifact = out.commit("import_data", CorpusFacts(format="text"), {}, {})
    assert [file.path for file in artifact.manifest.files] == ["copies/x", "copies/y", "staged"]
    assert (tmp_path / "kept" / "x").read_text() == "x"
    assert artifact.read("copies/y") == b"y"


def test_nothing_exists_before_commit(store_uri: str) -> None:
    with ArtifactWriter(store_uri) as out:
        with out.create("a") as local:
            local.write_text("a")
        with pytest.raises(FileNotFoundError, match="no finished artifact"):
            Artifact.open(store_uri)
        staging = out.staging
    assert not staging.exists()
    with pytest.raises(FileNotFoundError, match="no finished artifact"):
        Artifact.open(store_uri)


def test_commit_is_the_last_write(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("write", "upload"):
        original = getattr(type(open_store(store_uri)), name)

        def spy(self: Store, first: Any, second: Any, original: Any = original) -> Any:
            calls.append(second if isinstance(first, Path) else first)
            return original(self, first, second)

        monkeypatch.setattr(type(open_store(store_uri)), name, spy)
    write(store_uri)
    assert calls[-1] == "manifest.json"
    assert calls.count("manifest.json") == 1


def test_a_failure_removes_what_was_staged_and_commits_nothing(store_uri: str) -> None:
    with pytest.raises(RuntimeError, match="boom"), ArtifactWriter(store_uri) as out:
        staging = out.staging
        (out.staging / "half").write_text("half")
        with out.create("b"):
            raise RuntimeError("boom")
    assert not staging.exists()
    assert names(store_uri) == []
    write(store_uri)
    assert Artifact.open(store_uri).read("a.jsonl") == FILES["a.jsonl"]


def test_a_failure_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in ("new/a/b", "there"):
        with pytest.raises(RuntimeError), ArtifactWriter(str(tmp_path / folder)) as out:
            (out.staging / "x").write_text("x")
            raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with pytest.raises(RuntimeError), ArtifactWriter(str(tmp_path / "new")) as out:
        with out.create("kept") as path:
            path.write_text("x")
        raise RuntimeError
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]


def test_overwriting_an_artifact_first_makes_it_not_exist(store_uri: str) -> None:
    write(store_uri)
    with pytest.raises(RuntimeError), ArtifactWriter(store_uri) as out:
        with out.create("a.jsonl") as local:
            local.write_text("other")
        raise RuntimeError("killed here")
    with pytest.raises(FileNotFoundError, match="no finished artifact"):
        Artifact.open(store_uri)


def test_a_writer_that_writes_nothing_leaves_the_artifact(store_uri: str) -> None:
    written = write(store_uri)
    with pytest.raises(RuntimeError), ArtifactWriter(store_uri):
        raise RuntimeError("refused its input")
    assert Artifact.open(store_uri).manifest == written.manifest


def _damage(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    return {
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncated": data[:-1],
        "grown": data + b"x",
    }[how]


@pytest.mark.parametrize("how", ["flipped", "truncated", "grown"])
def test_damage_is_caught_by_every_way_of_reading(store_uri: str, how: str) -> None:
    write(store_uri)
    open_store(store_uri).write("a.jsonl", _damage(FILES["a.jsonl"], how))
    artifact = Artifact.open(store_uri)
    for attempt in (artifact.read, artifact.fetch, artifact.fetch, lambda _: artifact.fetch_all()):
        with pytest.raises(ValueError, match=r"a\.jsonl: .* the object is damaged or was replaced"):
            attempt("a.jsonl")
    assert artifact.read("folder.not") == b"x"


def test_a_listed_object_that_is_gone_is_named(store_uri: str) -> None:
    write(store_uri)
    open_store(store_uri).delete("a.jsonl")
    artifact = Artifact.open(store_uri)
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl.*listed in the manifest"):
        artifact.fetch("a.jsonl")
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        artifact.read("a.jsonl")


def test_objects_that_are_not_listed_are_not_read(store_uri: str) -> None:
    write(store_uri)
    open_store(store_uri).write("extra", b"x")
    with pytest.raises(FileNotFoundError, match="'extra' is not in the corpus manifest"):
        Artifact.open(store_uri).read("extra")


def test_fetch_all_of_a_folder_takes_that_folder_alone(store_uri: str) -> None:
    write(store_uri)
    artifact = Artifact.open(store_uri)
    open_store(store_uri).write("folder.not", b"damaged, and not of the folder")
    for prefix in ("folder", "folder/"):
        folder = artifact.fetch_all(prefix)
        assert [path.name for path in folder.iterdir()] == ["b +ü.jsonl"]
    open_store(store_uri).write("folder.not", FILES["folder.not"])
    root = artifact.fetch_all()
    assert {path: (root / path).read_bytes() for path in FILES} == FILES


def test_many_threads_fetch_into_one_folder(s3_uri: str) -> None:
    artifact = write(s3_uri, {f"part-{i:03}": os.urandom(1000) for i in range(30)})
    with ThreadPoolExecutor(8) as pool:
        local = list(pool.map(artifact.fetch, [f"part-{i:03}" for i in range(30)] * 2))
    assert len({path.parent for path in local}) == 1
    assert all(path.stat().st_size == 1000 for path in local)


def test_kind_and_place_are_checked(store_uri: str) -> None:
    write(store_uri)
    with pytest.raises(ValueError, match="this is a corpus artifact, and a tokens artifact is wanted"):
        Artifact.open(store_uri, "tokens")
    with pytest.raises(FileNotFoundError, match="import_data or import_model"):
        Artifact.open(store_uri + "/nowhere")


def test_a_manifest_that_names_paths_outside_does_not_open(store_uri: str) -> None:
    write(store_uri)
    tree = json.loads(open_store(store_uri).read("manifest.json"))
    tree["files"][0]["path"] = "../secret"
    open_store(store_uri).write("manifest.json", json.dumps(tree).encode())
    with pytest.raises(ValueError, match=r"manifest\.json: not a crosstrain manifest"):
        Artifact.open(store_uri)


def test_by_reference_reads_where_the_files_are(store_uri: str, tmp_path: Path) -> None:
    files = LocalStore(tmp_path / "user")
    files.write("data.txt", b"text")
    entry = files.digest("data.txt")
    manifest = Manifest(
        component="import_data",
        facts=CorpusFacts(format="text"),
        files=(File(path="data.txt", bytes=entry.bytes, sha256=entry.sha256),),
        options={},
        inputs={},
        base=files.uri,
    )
    commit_manifest(open_store(store_uri), manifest)
    artifact = Artifact.open(store_uri)
    assert artifact.read("data.txt") == artifact.fetch("data.txt").read_bytes() == b"text"
    assert names(store_uri) == ["manifest.json"]


@pytest.mark.parametrize("path", ["manifest.json", "../a", "/a", ""])
def test_paths_that_are_not_for_objects_are_refused_at_once(store_uri: str, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with ArtifactWriter(store_uri) as out, pytest.raises(ValueError, match=r"written by commit|not a relative key"):
        out.add(tmp_path / "file", path)


def test_a_place_that_cannot_be_written_is_refused_before_work(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PermissionError, match="choose another output"):
        ArtifactWriter(str(tmp_path / "file" / "out"))
    with pytest.raises(FileNotFoundError, match="no bucket 'no-such-bucket'"):
        ArtifactWriter("s3://no-such-bucket/out")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-reader-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-reader-secret")
    with pytest.raises(PermissionError, match=r"s3://.* refused the credentials from AWS_ACCESS_KEY_ID"):
        ArtifactWriter(s3_uri)


def test_what_a_killed_try_staged_goes_with_the_next_commit(tmp_path: Path) -> None:
    killed = ArtifactWriter(str(tmp_path / "out"))
    (killed.staging / "half").write_bytes(b"half")
    write(str(tmp_path / "out"))
    assert not killed.staging.exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        {n.split("/")[0] for n in FILES} | {"manifest.json"}
    )
