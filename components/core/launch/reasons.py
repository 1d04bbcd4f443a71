"""Why a job does not run yet, in the cluster's own words: its queue's, or those of events about its pods.

Asked for now and then while a job waits, never while it runs. Where the step has no right to look, the reason
is left out and the log says once what right is missing.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

from kubernetes.dynamic.resource import Resource

from crosstrain.components.core.launch.cluster import Cluster, Refused

log = logging.getLogger(__name__)

Object = dict[str, Any]

KUEUE_GROUP, WORKLOADS = "kueue.x-k8s.io", "workloads"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"

_SHORT_OF = re.compile(r"insufficient (?:unused )?quota for (\S+) in flavor (\S+?)(?:,|$)")


@dataclass(frozen=True)
class Admission:
    """What Kueue says of a job."""

    admitted: bool
    message: str = ""
    """Why not; names the resource that is short."""


def kueue(cluster: Cluster, plural: str = WORKLOADS) -> Resource:
    """A resource of Kueue, in the newest version that the cluster serves.

    Raises:
        ValueError: the cluster has no Kueue.
    """
    hint = "run_on.queue needs Kueue (HyperPod task governance); leave queue empty or install it"
    for version in KUEUE_VERSIONS[:-1]:
        try:
            return cluster.resource(f"{KUEUE_GROUP}/{version}", plural, hint)
        except ValueError:
            continue
    return cluster.resource(f"{KUEUE_GROUP}/{KUEUE_VERSIONS[-1]}", plural, hint)


class Reasons:
    """Looks up why a job waits."""

    def __init__(self, cluster: Cluster, workloads: Resource | None, events: Resource, uid: str, name: str) -> None:
        self._cluster, self._workloads, self._events, self._uid, self._name = cluster, workloads, events, uid, name
        self._refused: set[str] = set()

    def admission(self) -> Admission:
        """Whether the queue has let the job in; without a queue it is."""
        if self._workloads is None:
            return Admission(admitted=True)
        found = self._list(self._workloads, label_selector=f"{JOB_UID_LABEL}={self._uid}")
        if found is None:
            return Admission(admitted=False)
        if not found:
            return Admission(admitted=False, message="Kueue has made no Workload of it yet")
        conditions = {one["type"]: one for one in (found[0].get("status") or {}).get("conditions") or []}
        if conditions.get("Admitted", {}).get("status") == "True":
            return Admission(admitted=True)
        telling = {"QuotaReserved": "False", "Admitted": "False", "Evicted": "True"}
        known = [
            conditions[kind] for kind, status in telling.items() if conditions.get(kind, {}).get("status") == status
        ]
        why = [one["message"] for one in known if one.get("message")]
        message = why[0] if why else "waiting for quota"
        short = sorted({f"{resource} (flavor {flavor})" for resource, flavor in _SHORT_OF.findall(message)})
        return Admission(False, f"short of {', '.join(short)}: {message}" if short else message)

    def warning(self) -> str:
        """The newest warning about the job, its pods, or what its operator makes in between."""
        found = self._list(self._events, field_selector="type=Warning")
        about = [one for one in found or [] if one["involvedObject"].get("name", "").startswith(self._name)]
        if not about:
            return ""
        newest = max(about, key=lambda one: one.get("lastTimestamp") or one.get("eventTime") or "")
        return f"{newest.get('reason', '')}: {newest.get('message', '')}"

    def _list(self, resource: Resource, **selectors: str) -> list[Object] | None:
        try:
            items: list[Object] = self._cluster.list(resource, **selectors)["items"]
            return items
        except (PermissionError, Refused, ConnectionError) as error:
            if resource.name not in self._refused:
                self._refused.add(resource.name)
                log.warning("cannot say why the job waits: %s", error)
            return None
