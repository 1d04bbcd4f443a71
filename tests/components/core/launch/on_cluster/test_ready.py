"""Whether a cluster would take a job, asked of an API server over HTTP before anything is done."""

import pytest

from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.ready import check_cluster


@pytest.fixture
def check(api, kubeconfig):
    """A function of run_on settings that gives the findings' lines; there is a queue named gpus."""
    api.put("localqueues", "gpus", status={"conditions": [{"type": "Active", "status": "True"}]})

    def lines(**settings: object) -> list[str]:
        run_on = {"target": "hyperpod", "nodes": 2, "image": "i", "namespace": "team", **settings}
        return [finding.line for finding in check_cluster(RunOn.decode(run_on), "train_fp8")]

    return lines


def test_a_ready_cluster_gives_no_findings(check):
    assert check(queue="gpus") == []


def test_the_jobs_kind_is_missing(check, api):
    del api.groups["sagemaker.amazonaws.com/v1"]
    (line,) = check()
    assert line.startswith("error: train_fp8 namespace team: the cluster has no hyperpodpytorchjobs")
    assert "install the HyperPod training operator" in line


def test_missing_rights_are_named_together(check, api):
    api.denied = {("create", "hyperpodpytorchjobs"), ("patch", "hyperpodpytorchjobs"), ("get", "pods/log")}
    lines = check()
    assert len(lines) == 2
    assert "may not create, patch hyperpodpytorchjobs of sagemaker.amazonaws.com" in lines[0]
    assert 'apiGroups [""], resources [pods/log], verbs [get]' in lines[1]


def test_rights_that_cannot_be_asked_for_are_not_checked(check, api):
    api.refusals["create", "selfsubjectaccessreviews"] = (403, "not for you")
    (line,) = check()
    assert line.startswith("not checked: train_fp8 namespace team rights: ") and "not for you" in line


def test_the_queue_is_missing_stopped_or_kueue_is(check, api):
    (line,) = check(queue="cpus")
    assert line.startswith("error:") and "has no LocalQueue cpus" in line
    api.put("localqueues", "stopped", status={"conditions": [
        {"type": "Active", "status": "False", "reason": "ClusterQueueIsInactive", "message": "stopped"}]})  # fmt: skip
    (line,) = check(queue="stopped")
    assert line.startswith("warning:") and "ClusterQueueIsInactive: stopped" in line
    api.refusals["get", "localqueues"] = (403, 'User "runner" cannot get resource "localqueues"')
    (line,) = check(queue="gpus")
    assert line.startswith("not checked:") and "may not get localqueues" in line
    del api.groups["kueue.x-k8s.io/v1beta1"]
    (line,) = check(queue="gpus")
    assert line.startswith("error:") and "needs Kueue" in line


def test_without_a_cluster_nothing_is_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (finding,) = check_cluster(RunOn(target="trainjob", image="i", namespace="team"), "train_fp8")
    assert finding.level == "not checked" and "no Kubernetes cluster" in finding.what
