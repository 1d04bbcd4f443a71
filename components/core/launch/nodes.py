"""What the pods of a job say of themselves: which node they are, whether they run, why not, how they ended."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from crosstrain.components.core.launch.job import Exit

Object = dict[str, Any]

INDEX_LABELS = (
    "training.kubeflow.org/replica-index",
    "batch.kubernetes.io/job-completion-index",
)
"""Labels that hold a node's index; HyperPod's pods have it at the end of their name."""

STUCK = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
}  # fmt: skip
"""Reasons of a waiting container that seldom pass by themselves."""


@dataclass(frozen=True)
class Node:
    """One node of a job: its newest pod, read once."""

    index: int
    pod: str
    phase: str
    restarts: int
    """How often its container was started again."""
    running: bool
    up_since: float | None
    """When its container started, if it runs or ended well."""
    first_started: float | None
    """When its container started first, as far as the pod still knows."""
    ended: Exit | None
    """How its container ended last, if it is not running."""
    previous: Exit | None
    """How its container ended before the last restart."""
    stuck: str
    """Why its container cannot start: image, secret, security."""
    waiting: str
    """Why it has no node or no container yet, in the cluster's words."""


def seconds(time: str | None) -> float | None:
    """A Kubernetes time in seconds since the epoch."""
    return datetime.fromisoformat(time).timestamp() if time else None


def node_index(pod: Object) -> int:
    """Which node of the job a pod is, from 0."""
    labels = pod["metadata"].get("labels") or {}
    for label in INDEX_LABELS:
        if label in labels:
            return int(labels[label])
    found = re.search(r"-(\d+)$", pod["metadata"]["name"])
    return int(found[1]) if found else 0


def read_nodes(pods: Iterable[Object], container: str) -> list[Node]:
    """The job's nodes by index, each from its newest pod."""
    newest: dict[int, Object] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        newest[node_index(pod)] = pod
    return [read_node(newest[index], index, container) for index in sorted(newest)]


def read_node(pod: Object, index: int, container: str) -> Node:
    """One node from its pod."""
    status = pod.get("status") or {}
    statuses = {one["name"]: one for one in status.get("containerStatuses") or []}
    own: Object = statuses.get(container) or next(iter(statuses.values()), {})
    state, last = own.get("state") or {}, own.get("lastState") or {}
    running, terminated, before = state.get("running"), state.get("terminated"), last.get("terminated")
    waiting = state.get("waiting") or {}
    up = running or (terminated if terminated and not terminated.get("exitCode") else None)
    stuck = ""
    if waiting.get("reason") in STUCK:
        stuck = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    starts = [entry.get("startedAt") for entry in (before, terminated, running) if entry]
    return Node(
        index=index,
        pod=pod["metadata"]["name"],
        phase=status.get("phase", "Pending"),
        restarts=int(own.get("restartCount", 0)),
        running=running is not None,
        up_since=seconds(up.get("startedAt")) if up else None,
        first_started=min((moment for moment in map(seconds, starts) if moment is not None), default=None),
        ended=_exit(index, terminated),
        previous=_exit(index, before),
        stuck=stuck,
        waiting=stuck or _waiting(pod, status, waiting),
    )


def _exit(index: int, terminated: Object | None) -> Exit | None:
    if not terminated:
        return None
    finished = seconds(terminated.get("finishedAt")) or 0.0
    return Exit(index, int(terminated.get("exitCode", 0)), reason=terminated.get("reason", ""), finished=finished)


def _waiting(pod: Object, status: Object, waiting: Object) -> str:
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unscheduled')}: {condition.get('message', '')}".rstrip(": ")
    if waiting.get("reason"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return status.get("reason") or ""


def all_up(nodes: Iterable[Node], wanted: int) -> float | None:
    """Since when every node of the job runs or has ended well, or None if not all do."""
    starts = [node.up_since for node in nodes]
    if len(starts) < wanted or any(start is None for start in starts):
        return None
    return max(start for start in starts if start is not None)
