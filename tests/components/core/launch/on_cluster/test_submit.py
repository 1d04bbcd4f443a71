"""One job for one step, however often the step comes: adopted, replaced or refused, and owned by the step's pod."""

import pytest

from crosstrain.components.core.launch import cluster, submit
from crosstrain.components.core.launch.render import IDENTITY_ANNOTATION, render


@pytest.fixture
def step_pod(monkeypatch, tmp_path):
    """A function that makes this process the step's pod of a uid, in namespace team or another."""
    file = tmp_path / "namespace"
    monkeypatch.setattr(cluster, "NAMESPACE_FILE", file)

    def be(uid: str, namespace: str = "team") -> None:
        file.write_text(f"{namespace}\n")
        monkeypatch.setenv(submit.POD_NAME_VARIABLE, f"pod-{uid}")
        monkeypatch.setenv(submit.POD_UID_VARIABLE, uid)

    return be


def owners(one) -> list[str]:
    return [owner["uid"] for owner in one.api.objects[one.plural][one.name]["metadata"].get("ownerReferences") or []]


def test_the_steps_pod_owns_the_job(play, step_pod):
    step_pod("a")
    one = play().start()
    (owner,) = one.created()["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "pod-a", "uid": "a"}
    one.condition("Succeeded")
    one.result()


def test_a_pod_of_another_namespace_owns_nothing(play, step_pod, caplog):
    step_pod("a", namespace="kubeflow")
    one = play().start()
    assert not one.created().get("ownerReferences")
    assert owners(one) == [] and "does not die with the step's pod" in caplog.text
    one.condition("Succeeded")
    one.result()


def test_a_step_that_comes_again_goes_on_with_its_job(play, api, step_pod):
    api.age = 100
    step_pod("a")
    first = play().start()
    made = first.created()
    first.run_nodes(at=-30)
    step_pod("b")
    again = play().start()
    api.wait_for(lambda: owners(again) == ["a", "b"])
    assert api.objects[again.plural][again.name]["metadata"]["uid"] == made["metadata"]["uid"]
    again.watched()
    api.say(f"{again.name}-worker-0", "[rank0]: goes on")
    api.end_log(f"{again.name}-worker-0")
    again.condition("Succeeded")
    assert again.result().state == "succeeded" and again.shown == ["goes on"]
    assert again.result().seconds_running >= 29, "it counts from what the pods know"
    assert ("create", again.plural) in api.requests and len(api.objects[again.plural]) == 1


def test_a_job_that_ran_for_long_is_not_timed_out_on_sight(play, api):
    api.age = 1_000
    first = play(timeouts={"start": 100}).start()
    first.created()
    first.run_nodes(at=-900)
    again = play(timeouts={"start": 100}).start()
    again.condition("Succeeded")
    assert again.result().state == "succeeded"


def test_a_job_taken_over_has_no_new_time_to_run(play, api):
    api.age = 1_000
    first = play(timeouts={"run": 950}).start()
    first.created()
    first.run_nodes(at=-900)
    again = play(timeouts={"run": 800})
    api.objects[again.plural][again.name]["metadata"]["annotations"] = render(again.job)["metadata"]["annotations"]
    assert "not done after 800 s (timeouts.run)" in again.start().failure().result.reason


def test_a_job_that_ended_while_nobody_looked_is_taken_as_it_is(play, api):
    api.age = 100
    first = play().start()
    first.created()
    for index in range(2):
        api.say(first.end_node(index, 0, reason="Completed"), "[rank0]: the end")
        api.end_log(f"{first.name}-worker-{index}")
    first.condition("Succeeded")
    first.result()
    again = play().start()
    result = again.result()
    assert result.state == "succeeded" and again.shown == ["the end"]
    assert result.seconds_running == pytest.approx(60, abs=2)
    assert [one.code for one in result.exits] == [0, 0]


def test_a_failed_job_is_made_anew(play, api):
    first = play().start()
    made = first.created()
    first.condition("Failed")
    first.failure()
    again = play().start()
    api.wait_for(lambda: again.created()["metadata"]["uid"] != made["metadata"]["uid"])
    api.objects[again.plural][again.name].pop("status", None)
    again.condition("Succeeded")
    assert again.result().state == "succeeded"


def test_another_job_of_the_name_is_an_error(play, api):
    one = play()
    api.put(one.plural, one.name, metadata={"annotations": {IDENTITY_ANNOTATION: "f" * 64}})
    with pytest.raises(ValueError, match=r"exists in namespace team and is another job.*kubectl delete pytorchjobs"):
        one.start().result()
    assert not one.gone()


def test_a_job_that_is_being_deleted_is_waited_for(play, api):
    one = play()
    going = api.put(one.plural, one.name, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    one.start()
    api.wait_for(lambda: api.requests.count(("create", one.plural)) >= 2)
    api.remove(one.plural, one.name)
    api.wait_for(lambda: not one.gone())
    assert one.created()["metadata"]["uid"] != going["metadata"]["uid"]
    one.condition("Succeeded")
    one.result()


def test_a_job_that_does_not_go_is_not_waited_for_without_end(play, api, monkeypatch):
    monkeypatch.setattr(submit, "GONE_SECONDS", 0.5)
    one = play()
    api.put(one.plural, one.name, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    with pytest.raises(TimeoutError, match="not gone after"):
        one.start().result()


def test_a_lost_answer_to_create_makes_no_second_job(play, api):
    """The connection breaks after the server made the job: the second try finds it."""
    one = play()
    api.refusals["create", one.plural] = (503, "apiserver is restarting")
    one.start()
    api.wait_for(lambda: api.requests.count(("create", one.plural)) >= 2)
    api.refusals.clear()
    one.created()
    one.condition("Succeeded")
    assert one.result().state == "succeeded" and len(api.objects[one.plural]) == 1
