"""A training component as a job: its face launches it, the ranks' very command runs, and the step has its result."""

import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import dsl

from crosstrain.components import images
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import DATA_SUFFIX, execute, load_config
from crosstrain.components.train_fp8.component import train_fp8

PLURAL = "hyperpodpytorchjobs"
PRICE = {"usd_per_hour": 36.0, "source": "a contract", "date": "2026-12-01"}
RUN_ON = {
    "target": "hyperpod", "instance_type": "ml.p5.48xlarge", "nodes": 2, "namespace": "team", "queue": "crosstrain",
    "prices": {"ml.p5.48xlarge": PRICE}, "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
}  # fmt: skip
OPTIONS = {
    "train_fp8": {
        "run_on": RUN_ON, "global_batch_size": 2, "micro_batch_size": 2, "threads": 1, "evaluate_batches": 1,
        "warmup_steps": 1,
    }
}  # fmt: skip
TASK = dsl.TaskConfig(
    env=[{"name": "NCCL_DEBUG", "value": "INFO"}],
    tolerations=[{"key": "spot", "operator": "Exists"}],
    node_selector={"zone": "a"},
    volumes=[{"name": "lake", "persistentVolumeClaim": {"claimName": "lake"}}],
    volume_mounts=[{"name": "lake", "mountPath": "/lake"}],
    resources={"limits": {"memory": "100Gi"}},
)


@pytest.fixture
def shards(tmp_path) -> str:
    (tmp_path / "text").mkdir()
    lines = [json.dumps({"text": f"line {n} of {n * 7} words and more"}) for n in range(300)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    uri = str(tmp_path / "text")
    for component, field, more in (
        ("import_data", "source", {}),
        ("tokenize", "corpus", {"vocab_size": 300}),
        ("shard", "tokens", {"sequence_length": 16}),
    ):
        values = {field: uri, "output": str(tmp_path / f"{component}{DATA_SUFFIX}"), **more}
        uri = execute(component, load_config(component).decode(values)).artifact.uri
    return uri.removesuffix(DATA_SUFFIX)


class Step:
    """One try of the step, in a thread, as KFP's executor calls its face."""

    def __init__(self, shards: str, folder: Any) -> None:
        self.output = SimpleNamespace(uri=str(folder / "model"), path=str(folder / "kfp" / "model"), metadata={})
        self.logged: dict[str, float] = {}
        self._shards = SimpleNamespace(uri=shards)
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            train_fp8.python_func(
                shards=self._shards, model=self.output, metrics=SimpleNamespace(log_metric=self.logged.__setitem__),
                task_config=TASK, preset="debug", precision="fp32", steps=2, config=OPTIONS,
            )  # fmt: skip
            self._done.set_result(None)
        except Exception as error:  # noqa: BLE001, whatever it is, the test wants it
            self._done.set_exception(error)

    def wait(self) -> None:
        self._done.result(timeout=60)


def job(api) -> dict[str, Any]:
    (found,) = api.wait_for(lambda: api.objects.get(PLURAL), seconds=60).values()
    return found


def run_ranks(container: dict[str, Any]) -> None:
    """What a node of the job would do, without the launcher in front."""
    command = container["command"]
    done = subprocess.run([sys.executable, *command[command.index("-m") :]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def play_nodes(api, name: str, seconds_queued: int, seconds_run: int) -> None:
    """Two nodes that waited and ran for that long, and ended well."""
    from datetime import UTC, datetime, timedelta

    made = datetime.fromisoformat(api.objects[PLURAL][name]["metadata"]["creationTimestamp"]).astimezone(UTC)
    start = made + timedelta(seconds=seconds_queued)
    times = {"startedAt": start.isoformat(), "finishedAt": (start + timedelta(seconds=seconds_run)).isoformat()}
    for index in range(2):
        labels = {"app.kubernetes.io/instance": name}
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", **times}}
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "pytorch", "state": ended, "restartCount": 0}]}
        api.put("pods", f"{name}-pods-{index}", metadata={"labels": labels}, status=status)
        api.end_log(f"{name}-pods-{index}")
    condition = {"type": "Completed", "status": "True", "reason": "", "message": ""}
    api.put(PLURAL, name, status={"conditions": [condition], "completionTime": times["finishedAt"]})


def test_a_training_step_is_a_job_from_face_to_metrics(api, play, kubeconfig, shards, tmp_path, validate, pod_of):
    api.age = 10_000
    step = Step(shards, tmp_path)
    made = job(api)
    spelled = {**made, "kind": "HyperPodPyTorchJob", "metadata": {"name": made["metadata"]["name"]}}
    validate(spelled)
    template = pod_of(spelled)
    (container,) = template["spec"]["containers"]
    assert container["image"] == images.GPU and made["spec"]["replicaSpecs"][0]["replicas"] == 2
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "crosstrain"
    assert [one["key"] for one in template["spec"]["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert template["spec"]["nodeSelector"]["zone"] == "a"
    assert container["resources"]["limits"]["memory"] == "100Gi"
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    assert "/lake" in [mount["mountPath"] for mount in container["volumeMounts"]]
    run_ranks(container)
    play_nodes(api, made["metadata"]["name"], seconds_queued=600, seconds_run=1_000)
    step.wait()

    artifact = Artifact.open(step.output.uri + DATA_SUFFIX)
    assert artifact.manifest.sha256 == step.output.metadata["sha256"]
    assert "run_on" not in artifact.manifest.options
    assert {"train_loss", "tokens_seen", "peak_rss_bytes"} <= set(step.logged), "what the ranks measured"
    assert step.logged["nodes"] == 2 and step.logged["restarts"] == 0
    assert step.logged["queue_seconds"] == pytest.approx(600, abs=2)
    assert step.logged["run_seconds"] == pytest.approx(1_000, abs=2)
    assert step.logged["cost_usd"] == pytest.approx(2 * 1_000 / 3_600 * 36, rel=0.01), "the queue costs nothing"
    per_million = step.logged["cost_usd"] / step.logged["tokens_seen"] * 1e6
    assert step.logged["cost_usd_per_million_tokens"] == pytest.approx(per_million)
    record = json.loads(artifact.store.read("run.json"))
    assert record["job"]["cost"] == "2 x ml.p5.48xlarge at 36 USD/h, a contract, 2026-12-01"
    assert record["job"]["result"]["target"] == "hyperpod" and record["job"]["ranks"]["versions"]["torch"]

    again = Step(shards, tmp_path)
    again.wait()
    assert again.logged == step.logged and api.requests.count(("create", PLURAL)) == 1, "done once"


def test_a_job_that_wrote_somewhere_else_fails_the_step(api, play, kubeconfig, shards, tmp_path):
    step = Step(shards, tmp_path)
    made = job(api)
    play_nodes(api, made["metadata"]["name"], seconds_queued=0, seconds_run=0)
    with pytest.raises(ValueError, match=r"ended well and left no artifact at .*object storage or a volume"):
        step.wait()
