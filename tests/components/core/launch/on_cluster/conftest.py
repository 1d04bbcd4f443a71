"""A job under way on the API server, with the operator's part played by the test."""

import threading
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration

from crosstrain.components.core.launch import cluster as cluster_module
from crosstrain.components.core.launch import lifecycle, logs
from crosstrain.components.core.launch.cluster import Cluster
from crosstrain.components.core.launch.job import Job, JobFailed, JobResult, RunOn
from crosstrain.components.core.launch.render import KINDS


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Play:
    """A job under way in a thread, and the operator's part played on the server."""

    def __init__(self, api: Any, target: str, settings: dict[str, Any]) -> None:
        self.api, self.plural, self.container = api, KINDS[target].plural, KINDS[target].container
        run_on = RunOn.decode({"target": target, "nodes": 2, "processes_per_node": 2, "image": "i", **settings})
        self.job = Job(run="s3://lake/run-1", task="train_fp8", module="m", run_on=run_on)
        self.name = self.job.name
        self.spelling = api.groups.get(KINDS[target].api_version, {}).get(self.plural)
        self.shown: list[str] = []
        self.done: Future[JobResult] = Future()

    def start(self) -> "Play":
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            configuration = Configuration(host=self.api.url)
            cluster = Cluster(ApiClient(configuration), "team")
            self.done.set_result(lifecycle.run_on_cluster(self.job, cluster, self.shown.append))
        except Exception as error:  # noqa: BLE001, whatever it is, the test wants it
            self.done.set_exception(error)

    def created(self) -> dict[str, Any]:
        return self.api.wait_for(lambda: self.api.objects.get(self.plural, {}).get(self.name))

    def watched(self) -> None:
        """Wait until the step watches job and pods."""
        self.api.wait_for(lambda: {("watch", self.plural), ("watch", "pods")} <= set(self.api.requests))

    def pod(self, index: int, state: dict[str, Any], restarts: int = 0, **status: Any) -> str:
        name = f"{self.name}-worker-{index}"
        labels = {"app.kubernetes.io/instance": self.name, "training.kubeflow.org/replica-index": str(index)}
        own = {"name": self.container, "state": state, "restartCount": restarts, **status.pop("own", {})}
        phase = "Running" if "running" in state else "Pending" if "waiting" in state else "Failed"
        full = {"phase": phase, "containerStatuses": [own], **status}
        self.api.put("pods", name, metadata={"labels": labels}, status=full)
        return name

    def run_nodes(self, restarts: int = 0, at: float = 0) -> None:
        for index in range(2):
            self.pod(index, {"running": {"startedAt": ago(-at)}}, restarts)

    def end_node(self, index: int, code: int, at: float = 0, reason: str = "Error") -> str:
        times = {"startedAt": ago(60), "finishedAt": ago(-at)}
        return self.pod(index, {"terminated": {"exitCode": code, "reason": reason, **times}})

    def condition(self, kind: str, reason: str = "", message: str = "", **status: Any) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.api.put(self.plural, self.name, status={"conditions": [condition], **status})

    def result(self) -> JobResult:
        return self.done.result(timeout=20)

    def failure(self) -> JobFailed:
        error = self.done.exception(timeout=20)
        assert isinstance(error, JobFailed), error
        return error

    def gone(self) -> bool:
        return self.name not in self.api.objects.get(self.plural, {})


@pytest.fixture
def play(api, monkeypatch):
    """A function of a target and further run_on settings that gives a job to start on the server."""
    monkeypatch.setattr(lifecycle, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(logs, "DRAIN_SECONDS", 1.0)
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(cluster_module, "LONGEST_PAUSE_SECONDS", 0.1)

    def make(target: str = "pytorchjob", **settings: Any) -> Play:
        return Play(api, target, settings)

    return make
