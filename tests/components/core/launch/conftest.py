"""A judge of rendered objects: CRD schemas with unknown fields refused, pod templates strictly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

CRDS = Path(__file__).resolve().parents[3] / "data" / "crds"
KUBERNETES = "1.34"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON schema that refuses what an API server would silently drop."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        return {**{k: v for k, v in made.items() if k != "type"}, "type": ["integer", "string"]}
    if "items" in schema:
        made["items"] = strict(schema["items"])
    if "additionalProperties" in schema:
        made["additionalProperties"] = strict(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["properties"] = {name: strict(inner) for name, inner in schema.get("properties", {}).items()}
        made["additionalProperties"] = False
    return made


def check_pod(metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **metadata}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def pods(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates in a custom resource, with a TrainJob's patch joined to its trainer as the operator does."""
    spec = made["spec"]
    if made["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    if made["kind"] == "HyperPodPyTorchJob":
        return [replica["template"] for replica in spec["replicaSpecs"]]
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = json.loads(json.dumps(replicated["template"]["spec"]["template"]))
    (container,) = template["spec"]["containers"]
    trainer = spec["trainer"]
    container |= {key: trainer[key] for key in ("image", "command", "args", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return [template]


@pytest.fixture(scope="session")
def validate() -> Callable[[dict[str, Any]], None]:
    """Raises unless the object is valid and every one of its fields is known."""
    validators = {}
    for path in CRDS.glob("*.json"):
        known = json.loads(path.read_text())
        schema = strict(known["schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        validators[known["apiVersion"], known["kind"]] = jsonschema.Draft202012Validator(schema)

    def check(made: dict[str, Any]) -> None:
        validators[made["apiVersion"], made["kind"]].validate(made)
        for template in pods(made):
            check_pod(template["metadata"], template["spec"])

    return check


@pytest.fixture(scope="session")
def pod_of() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The one pod template of a rendered object."""
    return lambda made: pods(made)[0]
