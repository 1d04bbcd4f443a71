"""Object storage clients against one server: a large file up and down, and many objects of 1 MiB each way.

    python -m bench.storing ARM OPERATION --folder FOLDER --megabytes N --objects N --threads N

Operations: up, down, down_hashed, put, get. Endpoint and credentials come from the AWS variables. Small objects are
handled by equally many threads of one process for each client and end in memory; the large file ends on disk.
`down` hashes for nobody, and `down_hashed`, which is what our steps do with an artifact, for everybody: Store while the
bytes come, the others, which offer nothing of the kind, from the file that they have written.
"""

import argparse
import hashlib
import io
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.server import BUCKET

PREFIX = "bench"


@dataclass(frozen=True)
class Client:
    """One client's own way of doing each operation."""

    upload: Callable[[str, str], Any]
    """Store a file (path, key)."""
    download: Callable[[str, str], Any]
    """Fetch an object (key, path)."""
    download_hashed: Callable[[str, str], Any]
    """The same, with the file's SHA-256."""
    put: Callable[[str, bytes], Any]
    get: Callable[[str], bytes]


def _then_hash(download: Callable[[str, str], Any]) -> Callable[[str, str], str]:
    """A download whose file is hashed when it is there."""

    def run(key: str, path: str) -> str:
        download(key, path)
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return run


def ours() -> Client:
    """Store, which hashes with SHA-256 what it uploads."""
    from crosstrain.components.core.storage import open_store

    store = open_store(f"s3://{BUCKET}/{PREFIX}")
    return Client(
        lambda path, key: store.upload(Path(path), key),
        lambda key, path: store.download(key, Path(path), hashed=False),
        lambda key, path: store.download(key, Path(path)),
        store.write,
        store.read,
    )


def minio() -> Client:
    """minio-py with its defaults."""
    from minio import Minio

    url = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    client = Minio(url.netloc, key, secret, secure=False, region="us-east-1")

    def get(key: str) -> bytes:
        with client.get_object(BUCKET, key) as response:
            return bytes(response.read())

    def download(key: str, path: str) -> None:
        client.fget_object(BUCKET, key, path)

    return Client(
        lambda path, key: client.fput_object(BUCKET, key, path),
        download,
        _then_hash(download),
        lambda key, data: client.put_object(BUCKET, key, io.BytesIO(data), len(data)),
        get,
    )


def boto3() -> Client:
    """boto3 with s3transfer's defaults."""
    import boto3 as library
    from botocore.config import Config

    client = library.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], config=Config(max_pool_connections=32))

    def download(key: str, path: str) -> None:
        client.download_file(BUCKET, key, path)

    return Client(
        lambda path, key: client.upload_file(path, BUCKET, key),
        download,
        _then_hash(download),
        lambda key, data: client.put_object(Bucket=BUCKET, Key=key, Body=data),
        lambda key: bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read()),
    )


def obstore() -> Client:
    """The obstore package with its defaults."""
    import obstore as library
    from obstore.store import S3Store

    store = S3Store(BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})

    def download(key: str, path: str) -> None:
        with Path(path).open("wb") as stream:
            for block in library.get(store, key).stream():
                stream.write(block)

    return Client(
        lambda path, key: library.put(store, key, Path(path)),
        download,
        _then_hash(download),
        lambda key, data: library.put(store, key, data),
        lambda key: bytes(library.get(store, key).bytes()),
    )


ARMS: dict[str, Callable[[], Client]] = {f.__name__: f for f in (ours, minio, boto3, obstore)}
OPERATIONS = ("up", "down", "down_hashed", "put", "get")


def run(client: Client, task: argparse.Namespace, data: bytes) -> int:
    """One operation; the bytes it moved. `data` is a small object."""
    large, small = task.megabytes << 20, task.objects << 20
    file = str(task.folder / "large")
    keys = [f"{PREFIX}/{task.arm}/{number:05d}" for number in range(task.objects)]
    if task.arm == "ours":
        keys = [key.partition("/")[2] for key in keys]
    name = f"{task.arm}-large"
    if task.operation == "up":
        client.upload(file, name)
    elif task.operation in ("down", "down_hashed"):
        download = client.download if task.operation == "down" else client.download_hashed
        download(name, str(task.folder / f"{task.arm}-back"))
    else:
        with ThreadPoolExecutor(task.threads) as pool:
            if task.operation == "put":
                list(pool.map(lambda key: client.put(key, data), keys))
            else:
                assert sum(pool.map(lambda key: len(client.get(key)), keys)) == small
    return small if task.operation in ("put", "get") else large


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(prog="python -m bench.storing", description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("megabytes", "objects", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args()
    client = ARMS[task.arm]()
    client.put("ready" if task.arm == "ours" else f"{PREFIX}/ready", b"ready")
    with (task.folder / "large").open("rb") as stream:
        data = stream.read(1 << 20)
    began, cpu = time.monotonic(), time.process_time()
    moved = run(client, task, data)
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    print(json.dumps({"bytes": moved, "seconds": seconds, "cpu_seconds": used}))


if __name__ == "__main__":
    main()
