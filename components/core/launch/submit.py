"""Creating a job once, whatever happens to the step: a step that comes again finds its job by name.

The job found is adopted if it is the very same work and has not failed; a failed one is replaced, because a
retried step means another try (which resumes from the last checkpoint). Another job of the name is an error.
"""

import logging
import os
import threading
import time
from typing import Any

from kubernetes.dynamic.resource import Resource

from crosstrain.components.core.launch.cluster import Cluster, Refused, own_namespace, pauses
from crosstrain.components.core.launch.render import IDENTITY_ANNOTATION

log = logging.getLogger(__name__)

Object = dict[str, Any]

POD_NAME_VARIABLE, POD_UID_VARIABLE = "KFP_POD_NAME", "KFP_POD_UID"
"""Set by KFP in every step's container, from the pod's own fields."""

GONE_SECONDS = 300.0
"""How long a job that is being deleted may take to go."""

SUCCEEDED = {"Succeeded", "Complete", "Completed"}
FAILED = {"Failed"}


def verdict(found: Object) -> tuple[str, str]:
    """Whether a job has ended, by its conditions: "succeeded", "failed" or "", and its own words for it."""
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] in SUCCEEDED | FAILED:
            words = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return ("succeeded" if condition["type"] in SUCCEEDED else "failed"), words
    return "", ""


def owner(namespace: str) -> list[Object]:
    """The step's pod as owner of what it makes in its namespace; owners in other namespaces are not allowed."""
    name, uid = os.environ.get(POD_NAME_VARIABLE), os.environ.get(POD_UID_VARIABLE)
    if not name or not uid:
        return []
    if namespace != own_namespace():
        log.warning("the job runs in namespace %s, not in the step's: it does not die with the step's pod", namespace)
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]


def submit(cluster: Cluster, resource: Resource, body: Object) -> Object:
    """Create the job, or adopt the one that stands.

    Args:
        cluster: Where to.
        resource: The job's kind.
        body: As rendered.

    Returns:
        The object as the cluster has it.

    Raises:
        ValueError: the cluster refuses the object, or a different job has its name.
        PermissionError: the step's service account may not do this.
        Refused: the namespace's quota forbids it, or the namespace is not there.
    """
    owners = owner(cluster.namespace)
    body = {**body, "metadata": {**body["metadata"], "namespace": cluster.namespace, "ownerReferences": owners}}
    name, deadline = body["metadata"]["name"], time.monotonic() + GONE_SECONDS
    for pause in pauses():
        try:
            return cluster.create(resource, body)
        except Refused as refusal:
            if refusal.status in (400, 422):
                raise ValueError(f"{resource.kind} {name}: the cluster refuses it: {refusal}") from None
            if refusal.status != 409:
                raise
        try:
            found = cluster.get(resource, name)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            continue  # it went between the two calls
        if time.monotonic() > deadline:
            raise TimeoutError(f"{resource.kind} {name} is being deleted, and not gone after {GONE_SECONDS:.0f} s")
        if not found["metadata"].get("deletionTimestamp"):
            _refuse_another(found, body, resource)
            if verdict(found)[0] != "failed":
                return _adopt(cluster, resource, found, owners)
            log.info("%s %s failed before; starting it anew", resource.kind, name)
            cluster.delete(resource, name)
        threading.Event().wait(pause)
    raise AssertionError("pauses never end")


def _refuse_another(found: Object, wanted: Object, resource: Resource) -> None:
    there, here = ((one["metadata"].get("annotations") or {}).get(IDENTITY_ANNOTATION, "") for one in (found, wanted))
    if there != here:
        name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
        raise ValueError(
            f"{resource.kind} {name} exists in namespace {namespace} and is another job "
            f"({IDENTITY_ANNOTATION} there {there[:12] or 'missing'}, here {here[:12]}): "
            f"its settings or program changed within one run; delete it (kubectl delete {resource.name} {name} "
            f"-n {namespace}) or start a new run"
        )


def _adopt(cluster: Cluster, resource: Resource, found: Object, owners: list[Object]) -> Object:
    """Make the step's new pod an owner beside the old one, so that the job outlives the old one."""
    log.info("%s %s is there already; going on with it", resource.kind, found["metadata"]["name"])
    known = found["metadata"].get("ownerReferences") or []
    new = [one for one in owners if one["uid"] not in {other["uid"] for other in known}]
    if not new:
        return found
    patch = {"metadata": {"ownerReferences": [*known, *new], "resourceVersion": found["metadata"]["resourceVersion"]}}
    return cluster.merge(resource, found["metadata"]["name"], patch)
