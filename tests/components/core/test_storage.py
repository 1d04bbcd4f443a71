"""One suite for every store: a local folder and a real S3 server have to behave alike."""

import hashlib
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from crosstrain.components.core import s3
from crosstrain.components.core.storage import Entry, LocalStore, Store, check_key, open_store

KEYS = [
    "plain", "a b", "a+b", "a%20b", "a%2Bb", "ü/ñ", "日本/語.bin", "a&b=c?d#e", "it's \"q\"", "x~y", ":;,@$!*()[]{}",
]  # fmt: skip


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the least size that S3 takes, so that a few parts are a small file."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)


@pytest.mark.parametrize("key", KEYS)
def test_keys_come_back_exactly_as_they_went(store: Store, key: str) -> None:
    data = key.encode()
    store.write(key, data)
    assert store.read(key) == data
    assert [(entry.key, entry.bytes) for entry in store.list()] == [(key, len(data))]
    assert store.stat(key).etag == next(store.list()).etag
    store.delete(key)
    assert not store.exists(key)


def test_bulk_delete_takes_every_kind_of_key_and_nothing_beside_the_folder(store: Store) -> None:
    for key in KEYS:
        store.write(f"gone/{key}", b"x")
    store.write("gone-not", b"x")
    assert store.delete_prefix("gone") == len(KEYS)
    assert [entry.key for entry in store.list()] == ["gone-not"]
    assert store.delete_prefix("gone/") == 0


def test_list_is_sorted_and_a_folder_is_no_string_prefix(store: Store) -> None:
    keys = ["a/x", "a-b", "a.b", "a0", "B", "ab/c", "a/y/z", "ä"]
    for key in keys:
        store.write(key, b"x")
    assert [entry.key for entry in store.list()] == sorted(keys)
    assert [entry.key for entry in store.list("a")] == ["a/x", "a/y/z"]
    assert list(store.list("a/")) == list(store.list("a"))
    assert list(store.list("nothing")) == []
    assert [entry.key for entry in store.child("a").list()] == ["x", "y/z"]


def test_list_goes_on_past_one_page(store: Store) -> None:
    keys = [f"{i % 7}-{i:05}" if i % 3 else f"{i % 7}/{i:05}" for i in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.write(key, b""), keys))
    assert [entry.key for entry in store.list()] == sorted(keys)
    assert store.delete_prefix("") == len(keys)


def test_ranges(store: Store) -> None:
    data = bytes(range(256)) * 10
    store.write("object", data)
    assert store.read("object", 10) == data[10:]
    assert store.read("object", 10, 20) == data[10:30]
    assert store.read("object", 0, 1) == data[:1]
    assert store.read("object", 0, 0) == b""
    assert store.read("object", len(data) - 3, 100) == data[-3:]
    assert store.read("object", len(data)) == store.read("object", len(data) + 5, 7) == b""


def test_streams_read_in_pieces_and_seek(store: Store) -> None:
    data = os.urandom(3_000_000)
    store.write("object", data)
    with store.open("object") as stream:
        assert stream.seekable()
        assert stream.read(5) == data[:5]
        stream.seek(-4, os.SEEK_END)
        assert stream.read() == data[-4:]
        stream.seek(1_000_000)
        assert stream.read(2_000_000) == data[1_000_000:]
        assert stream.tell() == len(data)
    with store.open("object", 100, 1_500_000) as stream:
        pieces = list(iter(lambda: stream.read(700_001), b""))
        assert b"".join(pieces) == data[100:1_500_100]
        stream.seek(0)
        assert stream.read(3) == data[100:103]
        stream.seek(-2, os.SEEK_END)
        assert stream.read() == data[1_500_098:1_500_100]


def test_lines_come_through_a_stream(store: Store) -> None:
    store.write("lines", b"one\ntwo\n\nlast")
    with store.open("lines") as stream:
        assert list(stream) == [b"one\n", b"two\n", b"\n", b"last"]


@pytest.mark.parametrize("size", [0, 1, 5 << 20, (5 << 20) + 1, (12 << 20) + 7])
def test_upload_and_download_keep_and_hash_every_byte(
    store: Store, tmp_path: Path, small_parts: int, size: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    data = os.urandom(size)
    source.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    stored = store.upload(source, "folder/object")
    assert (stored.bytes, stored.sha256) == (size, sha256)
    assert store.stat("folder/object") == Entry("folder/object", size, stored.etag)
    assert store.download("folder/object", target) == stored
    assert target.read_bytes() == data
    assert store.download("folder/object", tmp_path / "unhashed", hashed=False) == replace(stored, sha256="")
    assert (tmp_path / "unhashed").read_bytes() == data
    assert store.digest("folder/object") == stored
    assert store.read("folder/object", max(size - 9, 0)) == data[-9:]
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert source.stat().st_mode == target.stat().st_mode


def test_upload_replaces(store: Store, tmp_path: Path) -> None:
    for data in (b"old and longer", b"new"):
        (tmp_path / "source").write_bytes(data)
        store.upload(tmp_path / "source", "object")
    assert store.read("object") == b"new"
    assert len(list(store.list())) == 1


def test_a_missing_object_is_named_and_downloads_nothing(store: Store, tmp_path: Path) -> None:
    for attempt in (
        store.stat,
        store.read,
        store.open,
        store.digest,
        lambda k: store.download(k, tmp_path / "x" / "y"),
    ):
        with pytest.raises(FileNotFoundError, match="no/such"):
            attempt("no/such")
    assert not list((tmp_path / "x").glob("*"))
    assert not store.exists("no/such")
    store.delete("no/such")


def test_write_if_absent_writes_once(store: Store) -> None:
    assert store.write_if_absent("key", b"first")
    assert not store.write_if_absent("key", b"second")
    assert store.read("key") == b"first"


def test_one_of_many_racing_writers_wins(store: Store) -> None:
    barrier = threading.Barrier(6)

    def write(number: int) -> bool:
        barrier.wait()
        return store.write_if_absent("lock", b"%d" % number)

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert sum(won) == 1
    assert store.read("lock") == b"%d" % won.index(True)


def test_write_if_match_needs_the_present_version(store: Store) -> None:
    assert not store.write_if_match("key", b"x", "0" * 32)
    assert not store.exists("key")
    old = store.write("key", b"one")
    new = store.write("key", b"three")
    assert not store.write_if_match("key", b"lost", old.etag)
    assert store.write_if_match("key", b"four", new.etag)
    assert store.read("key") == b"four"


def test_a_counter_raised_by_many_loses_no_step(store: Store) -> None:
    store.write("counter", b"0")

    def raise_it(_: int) -> None:
        while True:
            entry = store.stat("counter")
            value = int(store.read("counter"))
            if store.write_if_match("counter", b"%d" % (value + 1), entry.etag):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(raise_it, range(20)))
    assert store.read("counter") == b"20"


def test_checks_pass_and_leave_nothing(store: Store) -> None:
    store.check_writable()
    assert store.local_path() is None or not Path(store.uri).exists()
    store.check_conditional_writes()
    assert list(store.list()) == []


def test_a_store_that_ignores_conditions_is_found_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store), "write_if_absent", lambda self, key, data: bool(self.write(key, data)))
    with pytest.raises(OSError, match="ignores conditional writes"):
        store.check_conditional_writes()
    assert list(store.list()) == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", "../a", "a/../b", "./a", "a\0b", "..\\a"])
def test_keys_that_leave_the_store_are_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="not a relative key"):
        check_key(key)
    with pytest.raises(ValueError, match="not a relative key"):
        store.write(key, b"x")
    with pytest.raises(ValueError, match="not a relative key"):
        store.read(key)


def test_trailing_slash_and_child_name_the_same_place(store_uri: str) -> None:
    open_store(store_uri + "/").child("folder/").write("key", b"x")
    assert open_store(store_uri).read("folder/key") == b"x"
    assert open_store(f"{store_uri}/folder/").locate("key") == f"{store_uri}/folder/key"


def test_a_store_travels_to_another_process(store: Store) -> None:
    store.write("key", b"x")
    assert pickle.loads(pickle.dumps(store)).read("key") == b"x"
    child = os.fork()
    if child == 0:
        os._exit(0 if store.read("key") == b"x" and store.write("child", b"y").bytes == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read("child") == b"y"


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("s3://bucket/a//b", "'//' too many"),
        ("s3://bucket//a", "'//' too many"),
        ("s3://bucket/../a", "'..' part"),
        ("s3://b", "bucket name"),
        ("gs://bucket/a", "unknown scheme 'gs'"),
        ("file://folder/a", "file:///folder"),
        ("", "empty URI"),
    ],
)
def test_malformed_uris_are_refused(s3_uri: str, uri: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        open_store(uri)


def test_file_uris_are_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c"
    open_store(folder.as_uri()).write("key", b"x")
    assert (folder / "key").read_bytes() == b"x"


def test_local_temporary_files_are_not_listed_nor_left(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / ".crosstrain-staging-1").mkdir()
    (tmp_path / ".crosstrain-staging-1" / "file").write_text("x")
    (tmp_path / ".crosstrain-half").write_text("x")
    with pytest.raises(TypeError):
        store.write("folder/key", "no bytes")  # type: ignore[arg-type]
    assert list(store.list()) == []
    assert list((tmp_path / "folder").iterdir()) == []
    with pytest.raises(IsADirectoryError):
        store.read("folder")


def test_local_folders_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PermissionError, match="cannot write the output here"):
        LocalStore(tmp_path / "file" / "below").check_writable()


def test_deleting_the_last_object_removes_its_empty_folders(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b/c", b"x")
    store.write("a/d", b"x")
    store.delete("a/b/c")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["d"]
    store.delete("a/d")
    assert list(tmp_path.iterdir()) == []
