"""The rights that the documentation asks for are those that the launcher uses: all of them, and no more."""

from crosstrain.components.core.launch import submit
from crosstrain.components.core.launch.rights import rules


def test_a_life_uses_every_right_and_no_other(play, api, monkeypatch):
    monkeypatch.setattr(submit, "own_namespace", lambda: "team")
    monkeypatch.setenv(submit.POD_NAME_VARIABLE, "pod")
    lives = []
    for uid in ("uid-1", "uid-2"):  # created, then adopted
        monkeypatch.setenv(submit.POD_UID_VARIABLE, uid)
        lives.append(play("trainjob", queue="gpus", timeouts={"run": 6}).start())
        made = lives[-1].created()
        api.wait_for(lambda uid=uid, one=lives[-1]: uid in str(one.created()["metadata"]["ownerReferences"]))
    labels = {"kueue.x-k8s.io/job-uid": made["metadata"]["uid"]}
    api.put(
        "workloads", "w", metadata={"labels": labels}, status={"conditions": [{"type": "Admitted", "status": "True"}]}
    )
    api.wait_for(lambda: ("list", "events") in api.requests)
    lives[0].run_nodes()
    reasons = [one.failure().result.reason for one in lives]
    assert [reason for reason in reasons if "timeouts.run" in reason], "one gives up and deletes the job"
    allowed = {
        (verb, resource) for rule in rules("trainjob") for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert set(api.requests) == allowed


def test_without_a_queue_no_right_on_queues_is_asked():
    assert [rule for rule in rules("hyperpod", queue=False) if "workloads" in rule["resources"]] == []
