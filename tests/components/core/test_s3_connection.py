"""Where a store leads, what refusals say, and the private parts of the library that are relied on."""

import importlib.metadata
import io
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from minio.error import S3Error

from crosstrain.components.core import s3, s3_connection
from crosstrain.components.core.s3 import S3Store, part_size
from crosstrain.components.core.s3_connection import Patience, connect
from crosstrain.components.core.storage import open_store

BUCKET = "crosstrain-test"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long waits for a server that is not there."""
    monkeypatch.setattr(s3_connection, "FIRST_PATIENCE", Patience(tries=3, seconds=5, first_wait=0.02))


@pytest.mark.parametrize(
    ("scheme", "variables", "endpoint"),
    [
        ("s3", {}, "https://s3.amazonaws.com"),
        ("s3", {"AWS_ENDPOINT_URL": "http://host:8333/"}, "http://host:8333"),
        ("s3", {"AWS_ENDPOINT_URL": "http://host", "AWS_ENDPOINT_URL_S3": "https://other"}, "https://other"),
        ("minio", {}, "http://seaweedfs.kubeflow:9000"),
        ("minio", {"AWS_ENDPOINT_URL_S3": "https://other"}, "https://other"),
    ],
)
def test_endpoints(
    aws_environment: Callable, monkeypatch: pytest.MonkeyPatch, scheme: str, variables: dict[str, str], endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert connect(scheme).endpoint == endpoint


def test_aws_is_asked_in_its_region(aws_environment: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.setenv(name, {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "us-west-2"}[name])
        url = connect("s3")._client._base_url.build(method="GET", region="us-west-2", bucket_name="bucket")
        assert connect("s3")._client._base_url.region == {"AWS_DEFAULT_REGION": "eu-west-1"}.get(name, "us-west-2")
    assert url.geturl() == "https://bucket.s3.us-west-2.amazonaws.com/"


@pytest.mark.parametrize("endpoint", ["host:8333", "ftp://host", "http://", "http://host/path", "http://host?x=1"])
def test_malformed_endpoints_are_refused(s3_uri: str, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match=r"give AWS_ENDPOINT_URL as http\(s\)://host\[:port\]"):
        open_store(s3_uri)


def test_minio_uris_reach_the_same_objects(s3_uri: str) -> None:
    open_store(s3_uri).write("key", b"x")
    store = open_store(s3_uri.replace("s3://", "minio://"))
    assert store.read("key") == b"x"
    assert store.locate("key") == s3_uri.replace("s3://", "minio://") + "/key"


def test_a_whole_bucket_is_a_store(s3_uri: str) -> None:
    open_store(s3_uri).write("key", b"x")
    prefix = s3_uri.rpartition("/")[2]
    assert [entry.key for entry in open_store(f"s3://{BUCKET}").list(prefix)] == [f"{prefix}/key"]


def test_one_connection_serves_all_stores_until_the_variables_change(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connect("s3")
    assert connect("s3") is first
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert connect("s3") is not first


def test_a_forked_process_shares_no_connection(s3_uri: str) -> None:
    before = connect("s3")
    child = os.fork()
    if child == 0:
        os._exit(0 if connect("s3") is not before else 1)
    assert os.waitpid(child, 0)[1] == 0


OPERATIONS: dict[str, Callable[[S3Store, Path], object]] = {
    "open": lambda store, path: store.open("key"),
    "stat": lambda store, path: store.stat("key"),
    "list": lambda store, path: list(store.list()),
    "write": lambda store, path: store.write("key", b"x"),
    "upload": lambda store, path: store.upload(path, "key"),
    "download": lambda store, path: store.download("key", path),
    "write_if_absent": lambda store, path: store.write_if_absent("key", b"x"),
    "delete_prefix": lambda store, path: store.delete_prefix("folder"),
    "check_writable": lambda store, path: store.check_writable(),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small local file."""
    path = tmp_path / "file"
    path.write_text("x")
    return path


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_bucket_is_named(s3_uri: str, file: Path, operation: str) -> None:
    store = S3Store("s3://no-such-bucket/prefix")
    with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket/prefix.*: no bucket 'no-such-bucket' at http"):
        OPERATIONS[operation](store, file)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("key", "secret", "why"),
    [
        ("test-access-key", "WRONG-SECRET", "the secret key does not belong to the access key|may not|do not allow"),
        ("nobody", "WRONG-SECRET", "the access key is unknown there|do not allow"),
    ],
)
def test_a_wrong_key_is_named_with_its_source_and_without_its_secret(
    s3_uri: str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    operation: str, key: str, secret: str, why: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(PermissionError, match=f"refused the credentials from AWS_ACCESS_KEY_ID .*({why})") as refused:
        OPERATIONS[operation](S3Store(s3_uri), file)
    assert "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in str(refused.value)
    assert secret not in str(refused.value) + caplog.text


def test_a_reader_may_read_and_not_write(s3_uri: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_uri).write("key", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-reader-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-reader-secret")
    store = S3Store(s3_uri)
    assert store.read("key") == b"x"
    assert [entry.key for entry in store.list()] == ["key"]
    for operation in ("write", "upload", "write_if_absent", "check_writable"):
        with pytest.raises(PermissionError, match="they do not allow this"):
            OPERATIONS[operation](store, file)
    assert store.read("key") == b"x"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there_is_told_soon(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(OSError, match=r"failed 3 times .*Connection refused.*check AWS_ENDPOINT_URL"):
            open_store(s3_uri).read("key")
    assert time.monotonic() - started < 2


def test_sizes_of_parts() -> None:
    gib, tib = 1 << 30, 1 << 40
    assert part_size(0) == part_size(5 * gib) == part_size(156 * gib) == 16 << 20
    for size in (5 * 10**9 + 1, 5 * gib + 1, 50 * 10**9 + 1, 50 * gib + 1):  # more than one request may carry
        parts = -(-size // part_size(size))
        assert 1 < parts <= 10_000
        assert 5 << 20 <= part_size(size) <= 5 * gib
    for size in (157 * gib, tib, 5 * tib, 5 * tib - 1):
        assert part_size(size) % (1 << 20) == 0
        assert -(-size // part_size(size)) <= 10_000
        assert part_size(size) < size / 10_000 + (1 << 20)


def test_no_abandoned_upload_is_left_by_check_writable(s3_uri: str, seaweedfs: Any) -> None:
    open_store(s3_uri).check_writable()
    prefix = s3_uri.rpartition("/")[2]
    assert seaweedfs.client()._list_multipart_uploads(BUCKET, prefix=prefix).uploads == []


def test_the_library_is_the_one_whose_private_calls_are_used(s3_uri: str, seaweedfs: Any) -> None:
    """Conditional writes need a private call; when the public one honours conditions, this fails and it can go."""
    assert importlib.metadata.version("minio").startswith("7.2.")
    client, name = seaweedfs.client(), s3_uri.rpartition("/")[2] + "/key"
    client.put_object(BUCKET, name, io.BytesIO(b"first"), 5)
    client.put_object(BUCKET, name, io.BytesIO(b"again"), 5, metadata={"If-None-Match": "*"})
    assert client.get_object(BUCKET, name).data == b"again"
    with pytest.raises(S3Error, match="PreconditionFailed"):
        client._put_object(BUCKET, name, b"third", {"If-None-Match": "*"})


def test_a_large_upload_is_invisible_until_it_is_whole(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    (tmp_path / "large").write_bytes(bytes(11 << 20))
    store, seen = S3Store(s3_uri), []
    complete = S3Store._complete

    def look(self: S3Store, key: str, upload: str, parts: list) -> str:
        seen.extend([self.exists(key), len(parts)])
        return complete(self, key, upload, parts)

    monkeypatch.setattr(S3Store, "_complete", look)
    store.upload(tmp_path / "large", "key")
    assert seen == [False, 3]
    assert store.exists("key")
