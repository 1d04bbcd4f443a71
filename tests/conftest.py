"""What every test may use: a real S3 server (SeaweedFS) on loopback, stores on it and on a local folder, and a judge
of Kubernetes objects that refuses what an API server would silently drop.

Each pytest process starts a server of its own (bench/server.py) and kills it at the end.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.server import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFS
from crosstrain.components.core.storage import Store, open_store

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve the other test workers


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """The session's S3 server; do not kill this one."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def own_seaweedfs(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A started S3 server of the test's own, which it may kill and start again."""
    with SeaweedFS(tmp_path / "seaweedfs") as server:
        yield server


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
