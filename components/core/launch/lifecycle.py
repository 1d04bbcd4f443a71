"""A job on a cluster from creation to its end: followed by watches, bounded by time-outs, ended with its step.

One loop takes what watches, signals and the clock bring, and decides. It ends with a result, or with the reason
why there is none: the failing rank's last lines, what the queue or the scheduler said, or who deleted the job.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kubernetes.dynamic.resource import Resource

from crosstrain.components.core.launch import failure
from crosstrain.components.core.launch.clock import Clock
from crosstrain.components.core.launch.cluster import Broke, Changed, Cluster, Inbox, Listed, Refused
from crosstrain.components.core.launch.job import Exit, Job, JobFailed, JobResult
from crosstrain.components.core.launch.logs import LogFollower
from crosstrain.components.core.launch.nodes import Node, all_up, read_nodes, seconds
from crosstrain.components.core.launch.plan import JOB_LABEL, processes_per_node
from crosstrain.components.core.launch.postmortem import find_first_failure
from crosstrain.components.core.launch.reasons import Reasons, kueue
from crosstrain.components.core.launch.render import KINDS, render
from crosstrain.components.core.launch.signals import on_stop
from crosstrain.components.core.launch.submit import submit, verdict

log = logging.getLogger(__name__)

LOOK_SECONDS = 15.0
"""How often a waiting job's reasons are looked up."""

STUCK_SECONDS = 300.0
"""How long a container may fail to start (image, secret, security) before the job is given up."""

HINTS = {
    "hyperpod": "install the HyperPod training operator (EKS add-on), or choose another target",
    "trainjob": "install Kubeflow Trainer v2, or choose another target",
    "pytorchjob": "install Kubeflow's training operator v1, or choose another target",
}


def _print(line: str) -> None:
    print(line, flush=True)


def run_on_cluster(job: Job, cluster: Cluster, show: Callable[[str], None] = _print) -> JobResult:
    """Create or adopt the job, follow it to its end, and say how it went.

    Args:
        job: What to run, on a cluster target.
        cluster: Where.
        show: Takes each log line of the first node's first rank.

    Raises:
        JobFailed: it failed, was never started, was stopped or deleted; the result says which.
        ValueError: the job contradicts itself, or the cluster refuses it or lacks its kind.
        PermissionError: the step's service account lacks a right; the message names it.
    """
    kind = KINDS[job.run_on.target]
    render(job)  # whatever is wrong with the job itself is said before the cluster is asked
    resource = cluster.resource(kind.api_version, kind.plural, HINTS[job.run_on.target])
    queues = kueue(cluster) if job.run_on.queue else None
    inbox, stop = Inbox(), threading.Event()
    with on_stop(inbox.put):
        try:
            created = submit(cluster, resource, render(job, resource.kind))
        except Refused as refusal:
            raise JobFailed(_result(job, "failed", reason=f"not created: {refusal}")) from None
        core = {name: cluster.resource("v1", name, "") for name in ("pods", "events")}
        reasons = Reasons(cluster, queues, core["events"], created["metadata"]["uid"], job.name)
        cluster.watch("job", resource, inbox, stop, field_selector=f"metadata.name={job.name}")
        cluster.watch("pods", core["pods"], inbox, stop, label_selector=f"{JOB_LABEL}={job.name}")
        follower = LogFollower(cluster, kind.container, processes_per_node(job), show)
        life = _Life(job, cluster, resource, core["pods"], created, reasons, follower)
        try:
            return life.follow(inbox)
        finally:
            stop.set()
            follower.finish()


def _result(job: Job, state: Any, **known: Any) -> JobResult:
    return JobResult(
        name=job.name,
        target=job.run_on.target,
        state=state,
        nodes=job.run_on.nodes,
        processes_per_node=processes_per_node(job),
        instance_type=job.run_on.instance_type,
        **known,
    )


@dataclass
class _Wait:
    """Until when something is waited for, and what is said if it does not come."""

    until: float
    complaint: str


class _Life:
    """What is known of one job, and what follows from it."""

    def __init__(
        self, job: Job, cluster: Cluster, resource: Resource, pod_resource: Resource, created: dict[str, Any],
        reasons: Reasons, follower: LogFollower,
    ) -> None:  # fmt: skip
        self.job, self.cluster, self.reasons, self.follower = job, cluster, reasons, follower
        self.resource, self.pod_resource = resource, pod_resource
        self.unheard = {"job", "pods"}
        self.object = created
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: list[Node] = []
        self.container = KINDS[job.run_on.target].container
        self.created = seconds(created["metadata"]["creationTimestamp"]) or time.time()
        self.clock = Clock(self.created)
        self.container_starts = 0
        self.first_run: float | None = None
        self.admitted_at: float | None = None if job.run_on.queue else self.created
        self.waiting = ""
        self.stuck_since: float | None = None
        self.attached = time.time()
        self.looked = 0.0

    def follow(self, inbox: Inbox) -> JobResult:
        """Take what comes until the job has ended, one way or another."""
        while True:
            now = time.time()
            wait = self._wait()
            if now >= wait.until:
                self._give_up(wait.complaint)
            if self.clock.phase != "running" and time.monotonic() - self.looked >= LOOK_SECONDS:
                self._look()
            try:
                event = inbox.get(timeout=min(LOOK_SECONDS, max(0.0, wait.until - now)))
            except queue.Empty:
                continue
            if isinstance(event, signal.Signals):
                self._give_up(f"stopped by {event.name}")
            if isinstance(event, Broke):
                self._give_up_watching(event)
            if (result := self._take(event)) is not None:
                return result

    def _take(self, event: Listed | Changed) -> JobResult | None:
        self.unheard.discard(event.topic)
        if event.topic == "pods":
            if isinstance(event, Listed):
                self.pods = {pod["metadata"]["name"]: pod for pod in event.objects}
            elif event.deleted:
                self.pods.pop(event.object["metadata"]["name"], None)
            else:
                self.pods[event.object["metadata"]["name"]] = event.object
            self._read_pods()
            return None
        found = event.objects[0] if isinstance(event, Listed) and event.objects else None
        if isinstance(event, Changed) and not event.deleted:
            found = event.object
        if found is None or found["metadata"]["uid"] != self.object["metadata"]["uid"]:
            self._fail("it was deleted while the step waited for it, and not by the step", self.follower.lines)
        assert found is not None
        self.object = found
        state, words = verdict(found)
        if state == "failed":
            self._failed(words)
        return self._succeeded() if state == "succeeded" else None

    def _read_pods(self) -> None:
        self.nodes = read_nodes(self.pods.values(), self.container)
        starts = sum(node.restarts for node in self.nodes)
        since = all_up(self.nodes, self.job.run_on.nodes)
        if self.clock.phase == "running" and (since is None or starts > self.container_starts):
            ends = [one.finished for node in self.nodes for one in (node.ended, node.previous) if one is not None]
            self.clock.broken(max([end for end in ends if end >= self.clock.mark], default=time.time()))
            log.info("a node of %s ended; the job restarts or ends", self.job.name)
        if since is not None and self.clock.phase != "running":
            self._started(since, starts)
        self.container_starts = starts
        if self.nodes and self.admitted_at is None:
            self.admitted_at = time.time()
        stuck = next((node.stuck for node in self.nodes if node.stuck), "")
        self.stuck_since = (self.stuck_since or time.time()) if stuck else None
        self._say(next((f"node {node.index}: {node.waiting}" for node in self.nodes if node.waiting), ""))
        if self.nodes and self.nodes[0].index == 0 and self.nodes[0].first_started is not None:
            self.follower.follow(self.nodes[0].pod, self.nodes[0].restarts)

    def _started(self, since: float, starts: int) -> None:
        if self.first_run is None:
            known = [node.first_started for node in self.nodes if node.first_started is not None]
            self.first_run = max(known, default=since)
            self.clock.restarts = starts
            self.clock.running(min(self.first_run, since))
        else:
            self.clock.running(since)
        self.waiting = ""
        log.info("all %d nodes of %s run", len(self.nodes), self.job.name)

    def _wait(self) -> _Wait:
        """What the job is waited for to do next, and until when."""
        limits, phase = self.job.run_on.timeouts, self.clock.phase
        if self.unheard:  # a job taken over may have run for long
            return _Wait(self.attached + limits.start, f"nothing heard of the {' and '.join(sorted(self.unheard))}")
        why = f": {self.waiting}" if self.waiting else ""
        waits = []
        if self.first_run is not None:
            waits.append(_Wait(self.first_run + limits.run, f"not done after {limits.run} s (timeouts.run)"))
        if phase != "running" and self.admitted_at is None:
            begin = self.clock.mark if phase == "restarting" else self.created
            complaint = f"not admitted by queue {self.job.run_on.queue} after {limits.queue} s (timeouts.queue){why}"
            waits.append(_Wait(begin + limits.queue, complaint))
        elif phase != "running":
            begin = max(self.clock.mark, self.admitted_at or 0.0)
            waits.append(_Wait(begin + limits.start, f"not all nodes run after {limits.start} s (timeouts.start){why}"))
        if self.stuck_since is not None:
            waits.append(_Wait(self.stuck_since + STUCK_SECONDS, f"a container cannot start{why}"))
        return min(waits, key=lambda wait: wait.until)

    def _look(self) -> None:
        """Ask why the job waits."""
        self.looked = time.monotonic()
        admission = self.reasons.admission()
        if admission.admitted:
            self.admitted_at = self.admitted_at or time.time()
        elif not self.nodes:
            self.admitted_at = None
            self._say(admission.message)
        if self.admitted_at is not None and not any(node.waiting for node in self.nodes):
            self._say(self.reasons.warning())

    def _say(self, waiting: str) -> None:
        if waiting and waiting != self.waiting:
            log.info("%s waits: %s", self.job.name, waiting)
        self.waiting = waiting or self.waiting

    def _succeeded(self) -> JobResult:
        self._reread_pods()
        self.follower.finish()
        return self._end("succeeded")

    def _failed(self, words: str) -> None:
        self._reread_pods()
        self.follower.finish()
        found = find_first_failure(self.cluster, self.nodes, self.container, list(self.follower.lines))
        if any(node.running for node in self.nodes):
            log.info("nodes of %s still run; %s", self.job.name, self._delete())
        reason = "; ".join(filter(None, (found.reason, words))) or "the cluster does not say why"
        raise JobFailed(self._end("failed", reason=reason, tail=found.tail, exits=found.exits))

    def _reread_pods(self) -> None:
        """The pods as they are, for the job's end may be told before theirs."""
        try:
            found = self.cluster.list(self.pod_resource, label_selector=f"{JOB_LABEL}={self.job.name}")
        except (ConnectionError, Refused) as error:
            log.warning("the pods' ends are not known: %s", error)
            return
        self._take(Listed("pods", found["items"]))

    def _give_up(self, complaint: str) -> None:
        """Delete the job and fail."""
        self._fail(f"{complaint}; {self._delete()}", self.follower.lines)

    def _give_up_watching(self, event: Broke) -> None:
        done = self._delete()
        if isinstance(event.error, PermissionError):
            raise PermissionError(f"{event.error}; {done}")
        self._fail(f"the {event.topic} cannot be watched: {event.error}; {done}", ())

    def _delete(self) -> str:
        """Delete the job; what became of it."""
        try:
            self.cluster.delete(self.resource, self.job.name)
        except (PermissionError, ConnectionError, Refused) as error:
            return f"the job could not be deleted ({error})"
        return "the job was deleted"

    def _fail(self, reason: str, lines: Any) -> None:
        raise JobFailed(self._end("failed", reason=reason, tail=failure.tail(list(lines), None)))

    def _end(self, state: Any, exits: tuple[Exit, ...] = (), **known: Any) -> JobResult:
        starts = [node.first_started for node in self.nodes if node.first_started is not None]
        if self.first_run is None and len(starts) == self.job.run_on.nodes:
            self.clock.running(max(starts))  # it had ended before anybody looked
        completed = seconds((self.object.get("status") or {}).get("completionTime"))
        self.clock.end(
            completed or max([node.ended.finished for node in self.nodes if node.ended], default=time.time())
        )
        parts = self.clock.parts
        own = tuple(node.ended for node in self.nodes if node.ended is not None)
        reported = int((self.object.get("status") or {}).get("restartCount") or 0)
        made = _result(self.job, state, exits=exits or own, **known)
        return replace(
            made,
            seconds_queued=parts["queued"],
            seconds_running=parts["running"],
            seconds_restarting=parts["restarting"],
            restarts=max(self.clock.restarts, reported),
        )
