"""The rights that the documentation asks for are those that the launcher uses: all of them, and no more."""

from crosstrain.components.core.launch import submit
from crosstrain.components.core.launch.rights import rules


def test_a_life_uses_every_right_and_no_other(play, api, monkeypatch):
    monkeypatch.setattr(submit, "own_namespace", lambda: "team")
    monkeypatch.setenv(submit.POD_NAME_VARIABLE, "pod")
    for uid in ("a", "b"):  # created, then adopted
        monkeypatch.setenv(submit.POD_UID_VARIABLE, uid)
        one = play("trainjob", queue="gpus", timeouts={"run": 6}).start()
        one.created()
    labels = {"kueue.x-k8s.io/job-uid": one.created()["metadata"]["uid"]}
    api.put(
        "workloads", "w", metadata={"labels": labels}, status={"conditions": [{"type": "Admitted", "status": "True"}]}
    )
    api.wait_for(lambda: ("list", "events") in api.requests)
    one.run_nodes()
    assert "timeouts.run" in one.failure().result.reason
    allowed = {
        (verb, resource) for rule in rules("trainjob") for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert set(api.requests) == allowed


def test_without_a_queue_no_right_on_queues_is_asked():
    assert [rule for rule in rules("hyperpod", queue=False) if "workloads" in rule["resources"]] == []
