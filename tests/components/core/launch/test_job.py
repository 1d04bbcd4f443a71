"""The typed job: what a user may write, and the name that a retried step finds again."""

import re

import pytest

from crosstrain.components.core.launch.instances import load_instances
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.plan import processes_per_node


def named(run: str, task: str) -> str:
    return Job(run=run, task=task, module="m").name


def test_the_name_is_a_label_and_the_same_for_the_same_run_and_task():
    for task in ("train_fp8", "1-Fine Tune", "x" * 90, "für-alle", "--"):
        assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", named("s3://a/b", task)), task
        assert len(named("s3://a/b", task)) <= 40
    assert named("s3://a/b", "t") == named("s3://a/b", "t")
    assert len({named("s3://a/b", "t"), named("s3://a/c", "t"), named("s3://a/b", "u")}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 2}, "local is one machine"),
        ({"target": "slurm"}, "target"),
        ({"volumes": [{"claim": "fsx", "path": "/fsx"}]}, "belong to a cluster"),
        ({"target": "hyperpod", "priority": "high"}, "belong to a Kueue queue"),
        ({"target": "hyperpod", "topology": {"level": "x"}}, "belong to a Kueue queue"),
        ({"env": {"PET_NNODES": "2"}}, "PET_NNODES is set by the launcher"),
        (
            {"target": "trainjob", "secrets": {"WORLD_SIZE": {"secret": "s", "key": "k"}}},
            "WORLD_SIZE is set by the launcher",
        ),
        (
            {"target": "trainjob", "env": {"A": "1"}, "secrets": {"A": {"secret": "s", "key": "k"}}},
            "both in env and in secrets",
        ),
        ({"volumes": [{"claim": "fsx", "path": "data"}]}, "absolute path"),
        ({"instance": "ml.p5.48xlarge"}, "did you mean 'instance_type'"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunOn.decode(settings)


def test_values_as_kfp_delivers_them_are_taken():
    run_on = RunOn.decode({"target": "trainjob", "nodes": 2.0, "timeouts": {"run": 60.0}, "task_config": {"env": None}})
    assert run_on.nodes == 2 and run_on.timeouts.run == 60 and run_on.timeouts.queue == 86_400


def test_a_users_file_adds_and_replaces_instance_types(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("""
environments: {own: {always: {A: "1"}, several_nodes: {B: "2"}}}
instances:
  g6.12xlarge: {accelerator: NVIDIA L4, devices: {nvidia.com/gpu: 4}, processes: 4, vcpus: 48, memory_gib: 192,
                environment: [nvidia, own]}
  p5.48xlarge: {devices: {aws.amazon.com/neuroncore: 2}, vcpus: 8, memory_gib: 8}
""")
    known = load_instances(str(path))
    added = known.find("ml.g6.12xlarge")
    assert added.processes == 4
    assert known.variables(added, nodes=1)["A"] == "1" and "B" not in known.variables(added, nodes=1)
    assert known.variables(added, nodes=2)["FI_PROVIDER"] == "efa" and known.variables(added, nodes=2)["B"] == "2"
    assert known.find("p5.48xlarge").efa == 0, "an entry is replaced whole"
    assert known.find("trn1.32xlarge").efa == 8
    run_on = RunOn(target="trainjob", instance_type="g6.12xlarge", instances_file=str(path))
    assert processes_per_node(Job(run="r", task="t", module="m", run_on=run_on)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected a mapping"),
        ("instances: {a: {vcpus: 1}}", "instances.a.memory_gib: required"),
        ("instances: {a: {vcpus: 1, memory_gib: 1, environment: [nvidea]}}", "unknown environment 'nvidea'"),
        ("instances: {a: {vcpus: 1, memory_gib: 1, devices: {x/y: 1, x/z: 1}}}", "one kind of accelerator"),
        ("prices: {}", "prices: unknown option"),
    ],
)
def test_a_users_file_with_a_fault_says_which(tmp_path, text, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_instances(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"/nowhere/own\.yaml"):
        load_instances("/nowhere/own.yaml")


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({}, 1),
        ({"processes_per_node": 3}, 3),
        ({"target": "trainjob", "instance_type": "ml.trn2.48xlarge"}, 64),
        ({"target": "trainjob", "instance_type": "p5.48xlarge", "resources": {"nvidia.com/gpu": "1"}}, 1),
        ({"target": "trainjob", "instance_type": "p5.48xlarge", "processes_per_node": 2}, 2),
    ],
)
def test_processes_follow_the_accelerators(settings, processes):
    assert processes_per_node(Job(run="r", task="t", module="m", run_on=RunOn.decode(settings))) == processes
