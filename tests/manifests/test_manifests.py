"""Every overlay builds with a real kubectl, is valid to the last field, and gives nobody more than it needs."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.components.core.launch.instances import load_instances

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
GOLDEN = ROOT / "tests" / "golden" / "manifests"
OVERLAYS = ("hyperpod", "local")
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
Object = dict[str, Any]
Build = Callable[[Path], list[Object]]


def find(objects: list[Object], kind: str, name: str = "") -> Object:
    (found,) = [made for made in objects if made["kind"] == kind and name in ("", made["metadata"]["name"])]
    return found


def pod_specs(value: Any) -> Iterator[Object]:
    """Every pod specification, however deep a template holds it."""
    if isinstance(value, dict):
        if "containers" in value and isinstance(value["containers"], list):
            yield value
        for inner in value.values():
            yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


def with_component(tmp_path: Path, name: str) -> Path:
    """A kustomization of base and one component, beside a copy of nothing: kustomize takes relative folders only."""
    folder = tmp_path / "manifests"
    for part in ("base", "components"):
        target = folder / part
        target.mkdir(parents=True)
        for path in (MANIFESTS / part).rglob("*"):
            copy = target / path.relative_to(MANIFESTS / part)
            copy.mkdir(parents=True, exist_ok=True) if path.is_dir() else copy.write_bytes(path.read_bytes())
    overlay = folder / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["../base"], "components": [f"../components/{name}"], "namespace": "team"})
    )
    return overlay


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_of_an_overlay_is_valid(build: Build, validate: Callable[[Object], None], overlay: str) -> None:
    objects = build(MANIFESTS / "overlays" / overlay)
    assert len(objects) > 10
    for made in objects:
        validate(made)


def test_an_unknown_field_is_refused(build: Build, validate: Callable[[Object], None]) -> None:
    objects = build(MANIFESTS / "overlays" / "hyperpod")
    for kind, path in (("ClusterQueue", ["spec"]), ("ResourceQuota", ["spec"]), ("ClusterTrainingRuntime", ["spec"])):
        made = find(objects, kind)
        inner = made
        for step in path:
            inner = inner[step]
        inner["unknownField"] = 1
        with pytest.raises(Exception, match="unknownField"):
            validate(made)


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_builds_alone_on_the_base(
    build: Build, validate: Callable[[Object], None], tmp_path: Path, component: str
) -> None:
    for made in build(with_component(tmp_path, component)):
        validate(made)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_manifests_are_as_committed(build: Build, overlay: str) -> None:
    committed = list(yaml.safe_load_all((GOLDEN / f"{overlay}.yaml").read_text()))
    assert build(MANIFESTS / "overlays" / overlay) == committed, (
        f"renew: kubectl kustomize manifests/overlays/{overlay} > tests/golden/manifests/{overlay}.yaml"
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_roles_give_no_wildcard_and_no_secret_but_a_named_one(build: Build, overlay: str) -> None:
    objects = build(MANIFESTS / "overlays" / overlay)
    assert not [made for made in objects if made["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    roles = [made for made in objects if made["kind"] == "Role"]
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            assert not {"pods/exec", "pods/attach", "serviceaccounts/token"} & set(rule["resources"])
            if {"secrets", "configmaps"} & set(rule["resources"]):
                assert rule.get("resourceNames"), rule
            assert rule.get("resources") != ["pods"] or set(rule["verbs"]) <= {"get", "list", "watch"}
    bound = {subject["name"] for made in objects if made["kind"] == "RoleBinding" for subject in made["subjects"]}
    assert bound == {"crosstrain-runner"}
    assert find(objects, "ServiceAccount", "crosstrain-trainer")["automountServiceAccountToken"] is False


def test_the_runner_may_do_what_the_launcher_does(build: Build) -> None:
    role = find(build(MANIFESTS / "base"), "Role", "crosstrain-runner")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for path in (ROOT / "tests" / "data" / "crds").glob("*jobs.json"):
        group = json.loads(path.read_text())["apiVersion"].split("/")[0]
        for verb in ("create", "delete", "get", "list", "patch", "watch"):
            assert (group, path.stem, verb) in granted
    for wanted in (("", "pods", "watch"), ("", "pods/log", "get"), ("", "events", "list")):
        assert wanted in granted


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_meets_the_restricted_profile(build: Build, overlay: str) -> None:
    specs = list(pod_specs(build(MANIFESTS / "overlays" / overlay)))
    assert specs
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not [volume for volume in spec.get("volumes", ()) if "hostPath" in volume]
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_training_pods_may_reach_the_store_that_the_overlay_brings(build: Build) -> None:
    objects = build(MANIFESTS / "overlays" / "local")
    server = find(objects, "StatefulSet", "crosstrain-seaweedfs")["spec"]["template"]
    (port,) = [one["containerPort"] for one in server["spec"]["containers"][0]["ports"] if one["name"] == "s3"]
    allowed = [
        rule
        for policy in objects
        if policy["kind"] == "NetworkPolicy"
        and policy["spec"]["podSelector"].get("matchLabels") == {"app.kubernetes.io/managed-by": "crosstrain"}
        for rule in policy["spec"]["egress"]
        if port in [one["port"] for one in rule.get("ports", ())]
        for peer in rule["to"]
        if set(peer.get("podSelector", {}).get("matchLabels", {"none": ""}).items())
        <= set(server["metadata"]["labels"].items())
    ]
    assert allowed, "training pods would train and then lose their checkpoints"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_is_committed_and_no_placeholder_is_left(build: Build, overlay: str) -> None:
    objects = build(MANIFESTS / "overlays" / overlay)
    assert not [made for made in objects if made["kind"] == "Secret"]
    assert not re.findall(r"BUCKET|REGION|fs-0{8,}", yaml.safe_dump_all(objects))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_namespaced_lies_where_pipelines_run(build: Build, overlay: str) -> None:
    cluster_wide = {
        "ClusterQueue", "ResourceFlavor", "Topology", "WorkloadPriorityClass", "ClusterTrainingRuntime",
        "PersistentVolume",
    }  # fmt: skip
    for made in build(MANIFESTS / "overlays" / overlay):
        expected = None if made["kind"] in cluster_wide else "kubeflow"
        assert made["metadata"].get("namespace") == expected, made["kind"]


def test_quota_and_queue_hold_the_nodes_of_the_cluster_request(build: Build) -> None:
    objects = build(MANIFESTS / "overlays" / "hyperpod")
    request = json.loads((MANIFESTS / "hyperpod" / "cluster.json").read_text())
    nodes = {group["InstanceType"]: group["InstanceCount"] for group in request["InstanceGroups"]}
    instances = load_instances()
    totals: dict[str, int] = {}
    (group,) = find(objects, "ClusterQueue")["spec"]["resourceGroups"]
    flavors = {made["metadata"]["name"]: made["spec"] for made in objects if made["kind"] == "ResourceFlavor"}
    assert {flavor["name"] for flavor in group["flavors"]} == set(flavors)
    for flavor in group["flavors"]:
        assert [entry["name"] for entry in flavor["resources"]] == group["coveredResources"]
        (kind,) = flavors[flavor["name"]]["nodeLabels"].values()
        instance, quota = instances.find(kind), {entry["name"]: entry["nominalQuota"] for entry in flavor["resources"]}
        for name, count in {**instance.devices, "vpc.amazonaws.com/efa": instance.efa}.items():
            assert int(quota[name]) == nodes[kind] * count, (kind, name)
            totals[name] = totals.get(name, 0) + nodes[kind] * count
        assert int(quota["cpu"]) == nodes[kind] * instance.vcpus
        assert quota["memory"] == f"{nodes[kind] * instance.memory_gib}Gi"
    hard = find(objects, "ResourceQuota")["spec"]["hard"]
    assert {name: int(hard[f"requests.{name}"]) for name in totals} == totals


def test_taints_of_the_nodes_are_tolerated_by_the_flavors(build: Build) -> None:
    request = json.loads((MANIFESTS / "hyperpod" / "cluster.json").read_text())
    flavors = [made["spec"] for made in build(MANIFESTS / "overlays" / "hyperpod") if made["kind"] == "ResourceFlavor"]
    by_type = {spec["nodeLabels"]["node.kubernetes.io/instance-type"]: spec for spec in flavors}
    for group in request["InstanceGroups"]:
        tolerated = {entry["key"] for entry in by_type.get(group["InstanceType"], {}).get("tolerations", ())}
        assert {taint["Key"] for taint in group.get("KubernetesConfig", {}).get("Taints", ())} == tolerated


@pytest.mark.parametrize(
    ("folder", "upstream"),
    [
        ("cluster-scoped", [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubeflow"}}]),
        (
            "pipelines",
            [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "pipeline-install-config", "namespace": "kubeflow"},
                    "data": {"defaultSecurityContextRunAsNonRoot": "", "bucketName": "mlpipeline"},
                },
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "metadata": {"name": "ml-pipeline", "namespace": "kubeflow"},
                    "spec": {
                        "selector": {"matchLabels": {"app": "ml-pipeline"}},
                        "template": {
                            "metadata": {"labels": {"app": "ml-pipeline"}},
                            "spec": {
                                "containers": [
                                    {
                                        "name": "ml-pipeline-api-server",
                                        "image": "api",
                                        "env": [{"name": "A", "value": "b"}],
                                    }
                                ]
                            },
                        },
                    },
                },
            ],
        ),
    ],
)
def test_upstream_is_taken_by_tag_and_only_patched(
    build: Build, validate: Callable[[Object], None], tmp_path: Path, folder: str, upstream: list[Object]
) -> None:
    source = MANIFESTS / "kfp" / folder
    kustomization = yaml.safe_load((source / "kustomization.yaml").read_text())
    (resource,) = kustomization["resources"]
    assert re.fullmatch(r"https://github\.com/kubeflow/pipelines/manifests/kustomize/\S+\?ref=2\.17\.\d+", resource)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "upstream.yaml").write_text(yaml.safe_dump_all(upstream))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({**kustomization, "resources": ["upstream.yaml"]}))
    made = {one["kind"]: one for one in build(tmp_path)}
    for one in made.values():
        validate(one)
    if folder == "cluster-scoped":
        assert made["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        return
    assert made["ConfigMap"]["data"]["defaultSecurityContextRunAsNonRoot"] == "true"
    assert made["ConfigMap"]["data"]["bucketName"] == "mlpipeline"
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    accounts = [one["metadata"]["name"] for one in build(MANIFESTS / "base") if one["kind"] == "ServiceAccount"]
    assert env["A"] == "b" and env["DEFAULTPIPELINERUNNERSERVICEACCOUNT"] in accounts
