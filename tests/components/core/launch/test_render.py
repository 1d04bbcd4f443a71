"""Rendered jobs: golden files byte for byte, valid by the schemas, and every setting where Kubernetes looks for it.

`RENEW_GOLDEN=1 pytest tests/components/core/launch/test_render.py` writes the golden files anew.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from crosstrain.components.core import telemetry
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.render import IDENTITY_ANNOTATION, render

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "launch"
TARGETS = ("hyperpod", "trainjob", "pytorchjob")
SHAPES: dict[str, dict[str, Any]] = {
    "p5-2": {"instance_type": "ml.p5.48xlarge", "nodes": 2},
    "trn1-2": {"instance_type": "ml.trn1.32xlarge", "nodes": 2},
    "trn2-1": {"instance_type": "ml.trn2.48xlarge"},
    "cpu-1": {"instance_type": "ml.m5.4xlarge", "processes_per_node": 2},
}
SETTINGS: dict[str, Any] = {
    "queue": "hyperpod-ns-research-localqueue",
    "priority": "training-priority",
    "topology": {"level": "topology.k8s.aws/network-node-layer-3", "mode": "required"},
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "user_id": 1000,
    "volumes": [
        {"claim": "fsx", "path": "/fsx"},
        {"claim": "fsx", "path": "/corpus", "sub_path": "c4", "read_only": True},
    ],
    "secrets": {"HF_TOKEN": {"secret": "hugging-face", "key": "token"}},
    "env": {"NCCL_DEBUG": "INFO"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "research", "effect": "NoSchedule"}],
    "node_selector": {"sagemaker.amazonaws.com/instance-group-name": "train"},
    "task_config": {
        "resources": {"requests": {"memory": "100Gi"}, "limits": {"memory": "100Gi"}},
        "env": [{"name": "FROM_TASK", "value": "yes"}],
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "nodeSelector": {"zone": "a"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}]}},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
}  # fmt: skip


def job(target: str, arguments: tuple[str, ...] = ("--config", '{"steps":200}'), **settings: Any) -> Job:
    return Job(
        run="s3://lake/runs/7/train_fp8/model",
        task="train_fp8",
        module="crosstrain.components.train_fp8",
        arguments=arguments,
        image="registry.example/crosstrain/gpu-python@sha256:" + "0" * 64,
        steps=200,
        run_on=RunOn.decode({"target": target, **settings}),
    )


def spec_of(pod: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return pod["spec"], pod["spec"]["containers"][0]


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


@pytest.mark.parametrize("settings", [False, True], ids=["bare", "settings"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TARGETS)
def test_golden_and_valid(target, shape, settings, validate):
    made = render(job(target, **SHAPES[shape], **(SETTINGS if settings else {})))
    validate(made)
    path = GOLDEN / target / f"{shape}{'-settings' if settings else ''}.yaml"
    text = yaml.safe_dump(json.loads(json.dumps(made)), sort_keys=False, width=120)
    if os.environ.get("RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_no_golden_file_is_left_over():
    wanted = {f"{target}/{shape}{end}.yaml" for target in TARGETS for shape in SHAPES for end in ("", "-settings")}
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.yaml")} == wanted


@pytest.mark.parametrize("target", TARGETS)
def test_the_judge_refuses_unknown_fields(target, validate):
    made = render(job(target, **SHAPES["p5-2"]))
    made["spec"]["nodeCount"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nodeCount"):
        validate(made)


def test_the_judge_looks_into_pods(validate):
    made = render(job("pytorchjob", **SHAPES["p5-2"]))
    made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError), match="enviroment"):
        validate(made)


@pytest.mark.parametrize("target", TARGETS)
def test_a_p5_pair_asks_for_everything_the_node_has(target, pod_of):
    spec, container = spec_of(pod_of(render(job(target, **SHAPES["p5-2"]))))
    for side in ("requests", "limits"):
        asked = container["resources"][side]
        assert asked["nvidia.com/gpu"] == "8"
        assert asked["vpc.amazonaws.com/efa"] == "32"
        assert asked["hugepages-2Mi"] == "5120Mi"
        assert asked["memory"] == "1843Gi"
    assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == "ml.p5.48xlarge"
    assert spec["nodeSelector"]["sagemaker.amazonaws.com/node-health-status"] == "Schedulable"
    assert {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}} in spec["volumes"]
    assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    env = env_of(container)
    assert env["FI_PROVIDER"] == "efa" and env["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert not [name for name in env if name.startswith(("RDMAV_", "PET_")) or name == "NCCL_BUFFSIZE"]


@pytest.mark.parametrize("target", TARGETS)
def test_one_node_asks_for_no_network_card(target, pod_of):
    _, container = spec_of(pod_of(render(job(target, instance_type="ml.p5.48xlarge"))))
    assert "vpc.amazonaws.com/efa" not in container["resources"]["limits"]
    assert "FI_PROVIDER" not in env_of(container)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plain_node_is_not_asked_for_hyperpods_health_label(target, pod_of):
    spec, _ = spec_of(pod_of(render(job(target, instance_type="p5.48xlarge", nodes=2))))
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}


def test_neuron_processes_are_always_said():
    made = {target: render(job(target, **SHAPES["trn1-2"])) for target in TARGETS}
    assert made["trainjob"]["spec"]["trainer"]["numProcPerNode"] == 32
    assert made["hyperpod"]["spec"]["nprocPerNode"] == "32"
    assert made["pytorchjob"]["spec"]["elasticPolicy"]["nProcPerNode"] == 32


def test_a_part_of_a_node_gets_its_part_of_the_processes(pod_of):
    made = render(job("trainjob", instance_type="p5.48xlarge", resources={"nvidia.com/gpu": "2", "memory": "400Gi"}))
    assert made["spec"]["trainer"]["numProcPerNode"] == 2
    task = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    made = render(job("trainjob", instance_type="p5.48xlarge", task_config=task))
    assert made["spec"]["trainer"]["numProcPerNode"] == 4
    assert made["spec"]["trainer"]["resourcesPerNode"]["requests"]["nvidia.com/gpu"] == "4"


def test_hyperpod_keeps_what_a_failure_leaves():
    policy = render(job("hyperpod", **SHAPES["p5-2"]))["spec"]["runPolicy"]
    assert policy["cleanPodPolicy"] == "None"
    assert policy["ttlSecondsAfterFinished"] == 86_400
    assert policy["jobMaxRetryCount"] == 3


def test_pytorchjob_resumes_by_itself_only_when_retries_are_wanted():
    asked = render(job("pytorchjob", **SHAPES["p5-2"]))["metadata"]["annotations"]
    assert asked["sagemaker.amazonaws.com/enable-job-auto-resume"] == "true"
    assert asked["sagemaker.amazonaws.com/job-max-retry-count"] == "3"
    never = render(job("pytorchjob", **SHAPES["p5-2"], retries=0))["metadata"]["annotations"]
    assert set(never) == {IDENTITY_ANNOTATION}


@pytest.mark.parametrize("target", TARGETS)
def test_nodes_wait_long_for_one_another(target, pod_of):
    _, container = spec_of(pod_of(render(job(target, **SHAPES["p5-2"]))))
    line = " ".join([*container["command"], *container.get("args", [])])
    if target == "hyperpod":
        assert "--rdzv-backend=hyperpod" in line
    else:
        assert "join_timeout=1800,read_timeout=1800,timeout=1800" in line and "--rdzv-backend=c10d" in line


@pytest.mark.parametrize("target", TARGETS)
def test_arguments_are_not_expanded_by_kubernetes(target, pod_of):
    made = job(target, arguments=("--note", "$(HOME) costs $5"), env={"NOTE": "$(HOME)"}, **SHAPES["cpu-1"])
    _, container = spec_of(pod_of(render(made)))
    assert [*container["command"], *container.get("args", [])][-1] == "$$(HOME) costs $5"
    assert env_of(container)["NOTE"] == "$$(HOME)"


def test_queue_priority_and_topology_stand_where_kueue_reads_them(pod_of):
    for target in TARGETS:
        made = render(job(target, **SHAPES["p5-2"], **SETTINGS))
        assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "hyperpod-ns-research-localqueue"
        assert made["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "training-priority"
        annotations = pod_of(made)["metadata"]["annotations"]
        assert annotations == {"kueue.x-k8s.io/podset-required-topology": "topology.k8s.aws/network-node-layer-3"}


def test_what_the_task_was_given_reaches_the_job(pod_of):
    for target in TARGETS:
        spec, container = spec_of(pod_of(render(job(target, **SHAPES["p5-2"], **SETTINGS))))
        assert container["resources"]["limits"]["memory"] == "100Gi"
        assert env_of(container)["FROM_TASK"] == "yes"
        assert env_of(container)["HF_TOKEN"] == {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
        assert [one["key"] for one in spec["tolerations"]] == ["team", "spot"]
        assert spec["nodeSelector"]["zone"] == "a" and "nodeAffinity" in spec["affinity"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts["/scratch"]["name"] == "scratch"
        assert mounts["/fsx"]["name"] == mounts["/corpus"]["name"] and mounts["/corpus"]["readOnly"] is True


@pytest.mark.parametrize("target", TARGETS)
def test_pods_pass_the_restricted_standard(target, pod_of):
    spec, container = spec_of(pod_of(render(job(target, **SHAPES["p5-2"], user_id=1000))))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["runAsGroup"] == 1000
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize("steps", [1, 200])
def test_log_rules_match_the_line_that_programs_print(steps, capsys):
    telemetry.start("train_fp8")
    telemetry.step_line(steps, 200, loss=5.25, grad_norm=float("nan"))
    telemetry.step_line(2, 200)
    line, bare = capsys.readouterr().out.splitlines()
    first, recurring = render(job("hyperpod", **SHAPES["p5-2"]))["spec"]["runPolicy"]["logMonitoringConfiguration"]
    for pattern in (first["logPattern"], recurring["logPattern"]):
        assert re.match(pattern, line) and re.match(pattern, bare), "the agent matches from the line's start"
        assert not re.match(pattern, "2026-01-01 INFO crosstrain starts; step line follows")
    assert bool(re.match(recurring["stopPattern"], line)) == (steps == 200)


def test_nobody_elses_work_has_this_identity():
    def identity(**settings: Any) -> str:
        return render(job("hyperpod", **{**SHAPES["p5-2"], **settings}))["metadata"]["annotations"][IDENTITY_ANNOTATION]

    assert identity() == identity()
    assert len({identity(), identity(nodes=4), identity(retries=1), identity(queue="q"), identity(env={"A": "1"})}) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"instance_type": "ml.p9.1xlarge"}, "ml.p9.1xlarge.*instances_file"),
        ({"task_config": {"nodeSelector": {"a": "1"}}, "node_selector": {"a": "2"}}, "node label 'a' is given twice"),
        ({"task_config": {"env": [{"name": "A", "value": "1"}]}, "env": {"A": "2"}}, "variable 'A' is given twice"),
        ({"task_config": {"env": [{"name": "PET_NNODES", "value": "1"}]}}, "PET_NNODES is set by the launcher"),
        ({"task_config": {"resources": {"limits": {"memory": "1Gi"}}}, "resources": {"memory": "2Gi"}}, "resource 'm"),
        ({"volumes": [{"claim": "a", "path": "/x"}, {"claim": "b", "path": "/x"}]}, "mount path '/x' is given twice"),
        ({"task_config": {"volumes": [{"name": "dshm"}]}}, "volume 'dshm' is given twice"),
        ({"instance_type": "p5.48xlarge", "node_selector": {"node.kubernetes.io/instance-type": "x"}}, "given twice"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        render(job("trainjob", **settings))


def test_a_job_without_an_image_is_refused():
    with pytest.raises(ValueError, match="needs a container image"):
        render(job("trainjob").model_copy(update={"image": ""}))
