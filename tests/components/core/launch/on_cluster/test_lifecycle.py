"""Jobs on a cluster, against an API server over HTTP: every way a job's life can go, and what the step says of it."""

import re
import time

import pytest

from crosstrain.components.core.launch import lifecycle

PLURAL = {"hyperpod": "hyperpodpytorchjobs", "trainjob": "trainjobs", "pytorchjob": "pytorchjobs"}
API_VERSION = {"hyperpod": "sagemaker.amazonaws.com/v1", "trainjob": "trainer.kubeflow.org/v1alpha1"}
QUOTA = (
    "couldn't assign flavors to pod set pods: insufficient unused quota for nvidia.com/gpu in flavor p5, 8 more needed"
)
TABLE = """[rank3]: Traceback (most recent call last):
[rank3]: RuntimeError: shard 7 is damaged
tiny FAILED
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : node
  rank      : 3 (local_rank: 1)
  exitcode  : 5 (pid: 12)
  error_file: <N/A>"""


def stamp(offset: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset))


@pytest.mark.parametrize("target", PLURAL)
def test_a_job_runs_to_its_end(target, play, api):
    one = play(target).start()
    made = one.created()
    assert made["kind"] == one.spelling, "the cluster's own spelling"
    one.run_nodes()
    worker = f"{one.name}-worker-0"
    api.say(worker, "the launcher itself", "[rank0]: crosstrain step=1 total=2 loss=5", "[rank1]: not for the step")
    for index in range(2):
        api.end_log(one.end_node(index, 0, reason="Completed"))
    one.condition("Complete" if target == "trainjob" else "Succeeded")
    result = one.result()
    assert result.state == "succeeded" and result.target == target and result.restarts == 0
    assert [(one.node, one.code) for one in result.exits] == [(0, 0), (1, 0)]
    assert one.shown == ["the launcher itself", "crosstrain step=1 total=2 loss=5"]
    assert not one.gone(), "a finished job stays, for whoever wants to look"


def test_times_are_parted_into_queue_run_and_restart(play, api):
    api.age = 100
    one = play().start()
    one.created()
    ago = [stamp(offset) for offset in (-70, -40, -30, -10)]
    for index in range(2):
        one.pod(index, {"running": {"startedAt": ago[0]}})
    one.watched()
    api.wait_for(lambda: ("get", "pods/log") in api.requests)
    before = {"terminated": {"exitCode": 1, "startedAt": ago[0], "finishedAt": ago[1]}}
    one.pod(1, {"waiting": {"reason": "CrashLoopBackOff"}}, own={"lastState": before})
    one.pod(1, {"running": {"startedAt": ago[2]}}, restarts=1, own={"lastState": before})
    for index in range(2):
        one.pod(index, {"terminated": {"exitCode": 0, "startedAt": ago[2], "finishedAt": ago[3]}}, restarts=index)
    one.condition("Succeeded", completionTime=ago[3])
    result = one.result()
    assert result.seconds_queued == pytest.approx(30, abs=2)
    assert result.seconds_running == pytest.approx(50, abs=2)
    assert result.seconds_restarting == pytest.approx(10, abs=2)
    assert result.restarts == 1
    assert set(result.metrics()) == {"nodes", "queue_seconds", "run_seconds", "restart_seconds", "restarts"}


def test_the_first_failing_rank_and_its_last_lines_are_in_the_error(play, api):
    one = play().start()
    one.created()
    one.run_nodes(at=-60)
    early, late = (time.strftime("%Y-%m-%d_%H:%M:%S", time.gmtime(time.time() + offset)) for offset in (-20, -5))
    api.say(f"{one.name}-worker-1", "[rank2]: step 7", *TABLE.format(time=early).splitlines())
    late_table = TABLE.replace("rank3", "rank0").replace(": 3 (", ": 0 (").replace("shard 7 is damaged", "peer is gone")
    api.say(f"{one.name}-worker-0", *late_table.format(time=late).splitlines())
    one.end_node(0, 1, at=-4)
    one.end_node(1, 1, at=-3)  # its container ended last, its rank failed first
    one.condition("Failed", "PyTorchJobFailed", "PyTorchJob failed because 2 replicas failed")
    error = one.failure()
    assert "rank 3 on node 1 ended first, with exit status 5" in str(error)
    assert error.result.tail[-1] == "RuntimeError: shard 7 is damaged" and "peer is gone" not in str(error)
    assert "2 replicas failed" in error.result.reason
    assert {(one.node, one.rank, one.rank_code) for one in error.result.exits} == {(0, 0, 5), (1, 3, 5)}


def test_a_node_between_two_starts_tells_of_the_start_that_failed(play, api):
    one = play().start()
    one.created()
    worker = f"{one.name}-worker-1"
    api.previous_logs[worker] = [(stamp(), line) for line in TABLE.format(time="2026-01-01_00:00:00").splitlines()]
    api.say(worker, "[rank3]: of the new start")
    before = {"terminated": {"exitCode": 1, "startedAt": stamp(-60), "finishedAt": stamp(-5)}}
    one.pod(1, {"waiting": {"reason": "CrashLoopBackOff"}}, restarts=1, own={"lastState": before})
    one.condition("Failed")
    error = one.failure()
    assert "rank 3 on node 1 ended first, with exit status 5" in str(error)
    assert error.result.tail[-1] == "RuntimeError: shard 7 is damaged"


def test_a_node_killed_for_memory_is_said_so_and_running_peers_are_freed(play, api):
    one = play().start()
    one.created()
    one.run_nodes()
    api.say(f"{one.name}-worker-1", "[rank2]: step 7")
    one.end_node(1, 137, reason="OOMKilled")
    one.condition("Failed")
    assert "node 1 ended first, with exit status 137 (OOMKilled)" in str(one.failure())
    assert one.gone(), "node 0 would hold its accelerators"


def test_a_job_deleted_by_hand_ends_the_step(play, api):
    one = play().start()
    one.created()
    one.run_nodes()
    one.watched()
    api.remove(one.plural, one.name)
    assert "was deleted while the step waited" in one.failure().result.reason


def test_watches_survive_410_and_dropped_connections(play, api):
    one = play().start()
    one.created()
    one.watched()
    one.run_nodes()
    api.drop()
    lists = len([1 for request in api.requests if request == ("list", "pods")])
    api.forget()
    api.wait_for(lambda: len([1 for request in api.requests if request == ("list", "pods")]) > lists)
    api.refusals["watch", "pods"] = (503, "etcd is slow")
    api.drop()
    api.wait_for(lambda: api.requests.count(("watch", "pods")) >= 4)
    api.refusals.clear()
    one.condition("Succeeded")
    assert one.result().state == "succeeded"


def test_a_job_deleted_behind_a_gap_in_the_watch_is_missed_nonetheless(play, api):
    one = play().start()
    one.created()
    one.watched()
    with api.changed:
        del api.objects[one.plural][one.name]  # no event: the server has forgotten it
        api.forget()
    assert "was deleted" in one.failure().result.reason


def test_logs_come_once_over_dropped_connections_and_restarts(play, api):
    one = play().start()
    one.created()
    one.run_nodes()
    pod = f"{one.name}-worker-0"
    expected = []
    for turn in range(4):
        lines = [f"turn {turn} line {number}" for number in range(3)]
        expected += lines
        api.say(pod, *(f"[rank0]: {line}" for line in lines[:2]))  # two of one nanosecond
        api.wait_for(lambda lines=lines: lines[1] in one.shown)
        api.drop()
        api.say(pod, f"[rank0]: {lines[2]}")
    api.end_log(pod)
    one.condition("Succeeded")
    one.result()
    assert one.shown == expected


@pytest.mark.parametrize(
    ("verb", "plural", "what"),
    [
        ("create", "pytorchjobs", r"may not create pytorchjobs of kubeflow\.org in namespace team"),
        ("list", "pods", "may not list pods in namespace team"),
        ("watch", "pytorchjobs", r"may not watch pytorchjobs of kubeflow\.org"),
    ],
)
def test_missing_rights_are_named(verb, plural, what, play, api):
    api.refusals[verb, plural] = (
        403,
        f'{plural} is forbidden: User "sa:team:runner" cannot {verb} resource "{plural}"',
    )
    one = play().start()
    error = one.done.exception(timeout=20)
    assert isinstance(error, PermissionError)
    assert re.search(what, str(error)) and f"verbs [{verb}]" in str(error) and "sa:team:runner" in str(error)
    assert one.gone(), "what cannot be followed is not left behind"


def test_a_step_that_may_not_read_logs_still_follows_its_job(play, api):
    api.refusals["get", "pods/log"] = (403, "forbidden")
    one = play().start()
    one.created()
    one.run_nodes()
    one.condition("Succeeded")
    assert one.result().state == "succeeded"


def test_the_namespaces_quota_is_named(play, api):
    message = 'pytorchjobs "x" is forbidden: exceeded quota: team-a, requested: count/pytorchjobs=1, limited: 1'
    api.refusals["create", "pytorchjobs"] = (403, message)
    assert "exceeded quota: team-a" in play().start().failure().result.reason


def test_what_admission_refuses_is_the_users_to_mend(play, api):
    api.refusals["create", "trainjobs"] = (422, "unsupported runtime: torch-distributed")
    with pytest.raises(ValueError, match="the cluster refuses it: unsupported runtime"):
        play("trainjob").start().result()


@pytest.mark.parametrize("target", API_VERSION)
def test_a_cluster_without_the_kind_says_what_to_install(target, play, api):
    del api.groups[API_VERSION[target]]
    with pytest.raises(ValueError, match=f"the cluster has no {PLURAL[target]}.*install"):
        play(target).start().result()


def test_a_queue_needs_kueue(play, api):
    del api.groups["kueue.x-k8s.io/v1beta1"]
    with pytest.raises(ValueError, match=r"run_on\.queue needs Kueue"):
        play(queue="gpus").start().result()


def workload(api, made, **conditions: str) -> None:
    labels = {"kueue.x-k8s.io/job-uid": made["metadata"]["uid"]}
    told = [
        {"type": kind, "status": "True" if kind == "Admitted" else "False", "message": text}
        for kind, text in conditions.items()
    ]
    api.put("workloads", "w", metadata={"labels": labels}, status={"conditions": told})


def test_a_job_never_admitted_says_which_resource_is_short(play, api):
    one = play(queue="gpus", timeouts={"queue": 3}).start()
    workload(api, one.created(), QuotaReserved=QUOTA)
    reason = one.failure().result.reason
    assert "not admitted by queue gpus after 3 s" in reason
    assert "short of nvidia.com/gpu (flavor p5)" in reason and "8 more needed" in reason
    assert one.gone()


def test_an_admitted_job_waits_for_nodes_not_for_the_queue(play, api):
    one = play(queue="gpus", timeouts={"queue": 2, "start": 60}).start()
    workload(api, one.created(), Admitted="")
    time.sleep(3)
    assert not one.done.done()
    one.run_nodes()
    one.condition("Succeeded")
    assert one.result().seconds_queued >= 2


def test_pods_that_find_no_node_say_why(play, api):
    one = play(timeouts={"start": 3}).start()
    one.created()
    why = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "8 Insufficient nvidia.com/gpu",
    }
    one.pod(0, {}, phase="Pending", conditions=[why])
    reason = one.failure().result.reason
    assert "not all nodes run after 3 s" in reason and "8 Insufficient nvidia.com/gpu" in reason
    assert one.gone()


def test_pods_refused_by_a_quota_say_so(play, api):
    one = play("trainjob", timeouts={"start": 3}).start()
    one.created()
    about = {"name": f"{one.name}-node-0"}
    api.put("events", "e", type="Warning", reason="FailedCreate", message="exceeded quota: gpus", involvedObject=about,
            lastTimestamp=stamp())  # fmt: skip
    api.put("events", "f", type="Warning", reason="Other", message="not ours", involvedObject={"name": "other"},
            lastTimestamp=stamp(9))  # fmt: skip
    assert "FailedCreate: exceeded quota: gpus" in one.failure().result.reason


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", 'pull "registry.example/gpu:9": not found'),
        ("CreateContainerConfigError", 'secret "hf" not found'),
    ],
)
def test_a_container_that_cannot_start_is_given_up(reason, message, play, api, monkeypatch):
    monkeypatch.setattr(lifecycle, "STUCK_SECONDS", 1.0)
    one = play().start()
    one.created()
    one.pod(1, {"waiting": {"reason": reason, "message": message}})
    said = one.failure().result.reason
    assert f"node 1: {reason}: {message}" in said and one.gone()


def test_a_pull_that_succeeds_later_is_no_failure(play, api, monkeypatch):
    monkeypatch.setattr(lifecycle, "STUCK_SECONDS", 1.5)
    one = play().start()
    one.created()
    one.pod(1, {"waiting": {"reason": "ErrImagePull", "message": "timeout"}})
    one.watched()
    one.run_nodes()
    time.sleep(2)
    one.condition("Succeeded")
    assert one.result().state == "succeeded"


def test_a_job_past_its_time_is_deleted(play, api):
    one = play(timeouts={"run": 3}).start()
    one.created()
    one.run_nodes()
    assert "not done after 3 s (timeouts.run)" in one.failure().result.reason
    assert one.gone()
