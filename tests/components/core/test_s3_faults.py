"""What goes wrong between us and an S3 server: heals when it can, is one clear error when it cannot."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core import s3, s3_connection
from crosstrain.components.core.s3_connection import Patience
from crosstrain.components.core.storage import Store, open_store

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and short waits."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_connection, "PATIENCE", Patience(tries=6, seconds=20, first_wait=0.02, longest_wait=0.1))
    monkeypatch.setattr(s3_connection, "FIRST_PATIENCE", Patience(tries=4, seconds=5, first_wait=0.02))


@pytest.fixture
def proxy(s3_uri: str, seaweedfs: Any, flaky_proxy: Callable, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A failing proxy before the session's server, which the AWS variables name."""
    server = flaky_proxy(seaweedfs.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    return server


@pytest.fixture
def remote(s3_uri: str, proxy: Any) -> Store:
    """A store behind the failing proxy."""
    return open_store(s3_uri)


def _file(path: Path, size: int) -> tuple[Path, str]:
    data = os.urandom(size)
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


HEALING = [("status", 503, "SlowDown"), ("status", 500, "InternalError"), ("status", 429, "Busy"),
           ("status", 400, "RequestTimeout"), ("reset",), ("lost",)]  # fmt: skip


@pytest.mark.parametrize("fault", HEALING, ids=lambda fault: "-".join(map(str, fault)))
def test_every_operation_outlives_a_passing_fault(remote: Store, proxy: Any, tmp_path: Path, fault: tuple) -> None:
    source, sha256 = _file(tmp_path / "source", 11 * MIB)
    for operation in (
        lambda: remote.write("small", b"small"),
        lambda: remote.upload(source, "large"),
        lambda: remote.read("small"),
        lambda: remote.download("large", tmp_path / "target"),
        lambda: list(remote.list()),
        lambda: remote.write_if_absent("once", b"mine"),
        lambda: remote.delete("small"),
        lambda: remote.delete_prefix("nothing"),
    ):
        proxy.faults.extend([fault, None, fault])
        assert operation() is not False
        proxy.faults.clear()
    assert hashlib.sha256((tmp_path / "target").read_bytes()).hexdigest() == sha256
    assert remote.read("once") == b"mine"


def test_requests_carry_only_checksums_that_every_server_knows(remote: Store, proxy: Any, tmp_path: Path) -> None:
    """New clients add trailing checksums, which clones of S3 store as part of the object or refuse."""
    source, sha256 = _file(tmp_path / "source", 11 * MIB)
    remote.upload(source, "large")
    remote.write("small", b"small")
    assert remote.read("small") == b"small"
    assert remote.digest("large").sha256 == sha256
    remote.delete("small")
    assert remote.delete_prefix("") == 1
    assert list(remote.list()) == []
    for method, _, headers in proxy.seen:
        assert not [name for name in headers if name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-sdk"))]
        assert "aws-chunked" not in headers.get("content-encoding", "")
        if method == "PUT":
            assert re.fullmatch("[0-9a-f]{64}", headers["x-amz-content-sha256"])


def test_a_conditional_write_whose_answer_was_lost_is_still_ours(remote: Store, proxy: Any) -> None:
    proxy.faults.append(("lost",))
    assert remote.write_if_absent("lock", b"mine")
    assert not remote.write_if_absent("lock", b"mine")
    etag = remote.stat("lock").etag
    proxy.faults.append(("lost",))
    assert remote.write_if_match("lock", b"again mine", etag)
    remote.delete("lock")
    remote.write("lock", b"another's")
    proxy.faults.append(("reset",))
    assert not remote.write_if_absent("lock", b"mine")


@pytest.mark.parametrize("second", [None, ("status", 404, "NoSuchUpload")])
def test_a_completed_upload_whose_answer_was_lost_is_found(
    remote: Store, proxy: Any, tmp_path: Path, second: tuple | None
) -> None:
    """SeaweedFS completes an upload twice; AWS forgets it after the first time."""
    source, sha256 = _file(tmp_path / "source", 6 * MIB)
    proxy.matches = lambda method, path: method == "POST" and "uploadId=" in path
    proxy.faults.extend([("lost",), second])
    stored = remote.upload(source, "object")
    assert stored.sha256 == sha256 == remote.digest("object").sha256
    assert stored.etag == remote.stat("object").etag


@pytest.mark.parametrize("cut", [0, 1, 100_000, 4_000_000])
def test_a_stream_cut_in_the_middle_goes_on_where_it_broke(remote: Store, proxy: Any, tmp_path: Path, cut: int) -> None:
    source, sha256 = _file(tmp_path / "source", 12 * MIB)
    remote.upload(source, "object")
    proxy.faults.extend([("cut", cut), ("cut", cut), ("status", 503, "SlowDown")])
    with remote.open("object") as stream:
        assert hashlib.sha256(stream.read()).hexdigest() == sha256
    proxy.faults.extend([("cut", cut)] * 3)
    assert remote.download("object", tmp_path / "target").sha256 == sha256
    starts = [headers["range"] for _, _, headers in proxy.seen if "range" in headers]
    assert cut < MIB or f"bytes={cut // MIB * MIB}-" in starts


def test_an_upload_that_vanished_is_not_taken_for_done(remote: Store, proxy: Any, tmp_path: Path) -> None:
    source, _ = _file(tmp_path / "source", 6 * MIB)
    remote.upload(_file(tmp_path / "other", 6 * MIB)[0], "object")
    proxy.matches = lambda method, path: method == "POST" and "uploadId=" in path
    proxy.faults.extend([("reset",), ("status", 404, "NoSuchUpload")])
    with pytest.raises(OSError, match="NoSuchUpload"):
        remote.upload(source, "object")


def test_an_object_replaced_while_it_is_read_is_an_error_not_a_mixture(remote: Store, proxy: Any) -> None:
    remote.write("object", b"a" * 3 * MIB)
    with remote.open("object") as stream:
        stream.read(10)
        stream.seek(2 * MIB)
        remote.write("object", b"b" * 3 * MIB)
        with pytest.raises(OSError, match=r"object: was replaced while it was read"):
            stream.read()


def test_patience_ends_with_one_error(remote: Store, proxy: Any, caplog: pytest.LogCaptureFixture) -> None:
    remote.write("object", b"x")
    proxy.faults.extend([("status", 503, "SlowDown")] * 100)
    before = len(proxy.seen)
    with pytest.raises(OSError, match=r"s3://.*/object: .* failed 6 times in .* \(status 503, SlowDown: as told\)"):
        remote.read("object")
    assert len(proxy.seen) - before == 6
    assert "test-secret-key" not in caplog.text
    assert "try 2 follows" in caplog.text


def test_patience_is_bounded_in_seconds_too(remote: Store, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.write("object", b"x")
    monkeypatch.setattr(
        s3_connection, "PATIENCE", Patience(tries=10_000, seconds=0.5, first_wait=0.05, longest_wait=0.1)
    )
    proxy.faults.extend([("reset",)] * 10_000)
    started = time.monotonic()
    with pytest.raises(OSError, match="failed"):
        remote.read("object")
    assert time.monotonic() - started < 1.5


def test_waits_grow_and_are_drawn() -> None:
    patience = Patience(first_wait=1, longest_wait=8)
    bounds = [max(patience.wait(failed) for _ in range(300)) for failed in (1, 2, 3, 4, 9)]
    assert [round(bound) for bound in bounds] == [1, 2, 4, 8, 8]
    assert len({patience.wait(3) for _ in range(10)}) > 1


def test_what_cannot_heal_is_not_repeated(remote: Store, proxy: Any) -> None:
    for fault in (("status", 403, "AccessDenied"), ("status", 400, "MalformedXML"), ("status", 501, "NotImplemented")):
        proxy.faults.append(fault)
        before = len(proxy.seen)
        with pytest.raises(OSError):
            remote.read("object")
        assert len(proxy.seen) - before == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_credentials_that_expire_in_mid_run_are_renewed_and_the_request_repeated(
    method: str, s3_uri: str, proxy: Any, credential_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("POD-1")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{credential_server.endpoint}/v1/credentials")
    credential_server.given.extend([(key, secret, "", 3600 + i) for i in range(5)])
    store = open_store(s3_uri)
    store.write("object", b"x")
    assert len(credential_server.asked) == 1
    operation = {
        "GET": lambda: store.read("object"),
        "HEAD": lambda: store.stat("object"),
        "PUT": lambda: store.write("a", b""),
    }
    proxy.faults.append(("status", 400, "ExpiredToken"))
    operation[method]()
    assert len(credential_server.asked) == 2
    proxy.faults.extend([("status", 400, "ExpiredToken")] * 2)
    with pytest.raises(PermissionError, match=r"refused the credentials from the container credentials .*expired"):
        operation[method]()
    assert len(credential_server.asked) == 3
    (tmp_path / "token").write_text("POD-2")
    credential_server.given.appendleft(("unknown-key", secret, "", 3600))
    proxy.faults.append(("status", 400, "ExpiredToken"))
    with pytest.raises(PermissionError, match=r"refused the credentials"):
        operation[method]()
    operation[method]()
    assert credential_server.asked[-1]["authorization"] == "POD-2"


def test_an_upload_whose_credentials_expire_between_its_parts_completes(
    s3_uri: str, proxy: Any, credential_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "jwt").write_text("JWT-1")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/train")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credential_server.endpoint)
    credential_server.given.extend([(key, secret, "", 3600 + i) for i in range(9)])
    source, sha256 = _file(tmp_path / "source", 22 * MIB)
    proxy.matches = lambda method, path: "partNumber=3" in path
    proxy.faults.append(("status", 400, "ExpiredToken"))
    store = open_store(s3_uri)
    assert store.upload(source, "object").sha256 == sha256 == store.digest("object").sha256
    assert len(credential_server.asked) == 2


def test_a_failed_upload_leaves_nothing_and_the_next_completes(
    remote: Store, proxy: Any, seaweedfs: Any, tmp_path: Path, s3_uri: str
) -> None:
    source, sha256 = _file(tmp_path / "source", 22 * MIB)
    proxy.matches = lambda method, path: "partNumber=3" in path
    proxy.faults.extend([("status", 403, "AccessDenied")])
    with pytest.raises(PermissionError):
        remote.upload(source, "object")
    assert not remote.exists("object")
    bucket, prefix = s3_uri.removeprefix("s3://").split("/")
    assert seaweedfs.client()._list_multipart_uploads(bucket, prefix=prefix).uploads == []
    assert remote.upload(source, "object").sha256 == sha256 == remote.digest("object").sha256


def test_a_file_that_changes_its_size_during_the_upload_is_refused(remote: Store, proxy: Any, tmp_path: Path) -> None:
    source, _ = _file(tmp_path / "source", 12 * MIB)

    def grow(method: str, path: str) -> bool:
        if "uploads=" in path:
            with source.open("ab") as stream:
                stream.write(b"more")
        return False

    proxy.matches, proxy.faults = grow, proxy.faults.__class__([None])
    with pytest.raises(OSError, match="changed its size"):
        remote.upload(source, "object")
    assert not remote.exists("object")


def _kill_when(server: Any, ready: Callable[[], bool]) -> threading.Thread:
    def wait_and_kill() -> None:
        deadline = time.monotonic() + 10
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.002)
        server.kill()

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_upload_and_download(
    own_seaweedfs: Any, aws_environment: Callable[[str], None], tmp_path: Path, flaky_proxy: Callable
) -> None:
    proxy = flaky_proxy(own_seaweedfs.endpoint)
    aws_environment(proxy.endpoint)
    store = open_store("s3://crosstrain-test/killed")
    source, sha256 = _file(tmp_path / "source", 42 * MIB)

    killer = _kill_when(own_seaweedfs, lambda: any("partNumber=3" in path for _, path, _ in proxy.seen))
    with pytest.raises(OSError, match=r"s3://.*/object: .* failed"):
        store.upload(source, "object")
    killer.join()
    own_seaweedfs.start()
    assert not store.exists("object")
    assert store.upload(source, "object").sha256 == sha256

    proxy.seen.clear()
    killer = _kill_when(own_seaweedfs, lambda: sum("range" in headers for _, _, headers in proxy.seen) > 3)
    with pytest.raises(OSError, match=r"s3://.*/object: .* failed"):
        store.download("object", tmp_path / "folder" / "target")
    killer.join()
    assert list((tmp_path / "folder").iterdir()) == []
    own_seaweedfs.start()
    assert store.download("object", tmp_path / "folder" / "target").sha256 == sha256


@pytest.mark.slow
def test_a_server_that_comes_back_in_time_is_not_noticed(
    own_seaweedfs: Any, aws_environment: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_connection, "PATIENCE", Patience(tries=1000, seconds=60, first_wait=0.2, longest_wait=0.5))
    aws_environment(own_seaweedfs.endpoint)
    store = open_store("s3://crosstrain-test/back")
    store.write("first", b"x")
    own_seaweedfs.kill()
    source, sha256 = _file(tmp_path / "source", 12 * MIB)
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(store.upload, source, "object")
        own_seaweedfs.start()
        assert stored.result().sha256 == sha256
    assert store.digest("object").sha256 == sha256
