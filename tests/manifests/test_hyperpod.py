"""Requests to AWS are checked against botocore's models, enums, patterns and maximums included; none was sent."""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.model import OperationModel

from crosstrain.components.core.launch.instances import load_instances

FOLDER = Path(__file__).resolve().parents[2] / "manifests" / "hyperpod"
REQUESTS = {
    "cluster.json": ("sagemaker", "create-cluster"),
    "scheduler-config.json": ("sagemaker", "create-cluster-scheduler-config"),
    "compute-quota.json": ("sagemaker", "create-compute-quota"),
    "associate-runner.json": ("eks", "create-pod-identity-association"),
    "associate-trainer.json": ("eks", "create-pod-identity-association"),
}
Object = dict[str, Any]
Operation = Callable[[str, str], OperationModel]
Refusals = Callable[[OperationModel, Object], list[str]]


def request(name: str) -> Object:
    loaded: Object = json.loads((FOLDER / name).read_text())
    return loaded


def test_every_request_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == set(REQUESTS)


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_valid(operation: Operation, refusals: Refusals, name: str) -> None:
    assert refusals(operation(*REQUESTS[name]), request(name)) == []


def changed(value: Any, *path: Any) -> Object:
    made = copy.deepcopy(request("cluster.json"))
    inner: Any = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        ("Auto", ("NodeRecovery",), "none of Automatic, None"),
        ("ml.p5.99xlarge", ("InstanceGroups", 0, "InstanceType"), "none of"),
        (["Stress"], ("InstanceGroups", 0, "OnStartDeepHealthChecks"), "InstanceStress"),
        (7000, ("InstanceGroups", 0, "InstanceCount"), "over the maximum"),
        (101, ("TieredStorageConfig", "InstanceMemoryAllocationPercentage"), "over the maximum"),
        ("cross_train", ("ClusterName",), "does not match"),
        ("arn:aws:iam::1:role/x-long-enough", ("ClusterRole",), "does not match"),
        ("a" * 64, ("ClusterName",), "over the maximum"),
        ("x", ("Unknown",), "Unknown"),
        ("x", ("InstanceGroups", 0, "InstanceCount"), "Invalid type"),
        ([], ("VpcConfig", "Subnets"), "Invalid length"),
    ],
)
def test_a_wrong_request_is_refused(
    operation: Operation, refusals: Refusals, value: Any, path: tuple[Any, ...], said: str
) -> None:
    found = refusals(operation("sagemaker", "create-cluster"), changed(value, *path))
    assert any(said in line for line in found), found


def test_the_cluster_checks_deeply_and_recovers_by_itself() -> None:
    cluster = request("cluster.json")
    assert cluster["NodeRecovery"] == "Automatic"
    assert cluster["TieredStorageConfig"]["Mode"] == "Enable"
    groups = {group["InstanceType"]: group for group in cluster["InstanceGroups"]}
    accelerated = [group for name, group in groups.items() if name.startswith(("ml.p5", "ml.trn1"))]
    assert len(accelerated) == 2
    for group in accelerated:
        assert {"InstanceStress", "InstanceConnectivity"} <= set(group["OnStartDeepHealthChecks"])
        load_instances().find(group["InstanceType"])
    assert groups["ml.m5.4xlarge"]["InstanceCount"] >= 1, "KFP's own pods tolerate no taint"


def test_service_accounts_of_the_associations_exist(build: Callable[[Path], list[Object]]) -> None:
    accounts = {
        (made["metadata"]["namespace"], made["metadata"]["name"])
        for made in build(FOLDER.parent / "overlays" / "hyperpod")
        if made["kind"] == "ServiceAccount"
    }
    associated = {(made["namespace"], made["serviceAccount"]) for made in map(request, REQUESTS) if "namespace" in made}
    assert associated == accounts


def test_policies_name_a_bucket_prefix_and_no_wildcard_action() -> None:
    for path in (FOLDER / "iam").glob("*-policy.json"):
        for statement in json.loads(path.read_text())["Statement"]:
            actions, resources = (
                [value] if isinstance(value, str) else value for value in (statement["Action"], statement["Resource"])
            )
            assert not [action for action in actions if "*" in action]
            assert all(name.startswith("arn:aws:s3:::crosstrain-") for name in resources)
    for path in (FOLDER / "iam").glob("*-trust.json"):
        (statement,) = json.loads(path.read_text())["Statement"]
        assert statement["Condition"]["StringEquals"]["aws:SourceAccount"]


def test_the_life_cycle_script_runs(tmp_path: Path) -> None:
    script = FOLDER / "lifecycle" / request("cluster.json")["InstanceGroups"][0]["LifeCycleConfig"]["OnCreate"]
    done = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode and "is up" in done.stdout
