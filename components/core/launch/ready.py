"""Whether a cluster would take a job: asked before any work is done, with the rights that the step has.

What the step may not ask is told as not checked. Left out: whether the queue's quota is large enough (reading
ClusterQueues is an administrator's right; the launcher names what is short when a job is not admitted).
"""

from collections.abc import Iterator

from crosstrain.components.core.findings import Finding, error, not_checked, warning
from crosstrain.components.core.launch.cluster import Cluster, Refused
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.lifecycle import HINTS
from crosstrain.components.core.launch.reasons import kueue
from crosstrain.components.core.launch.render import KINDS
from crosstrain.components.core.launch.rights import rules


def check_cluster(run_on: RunOn, where: str) -> list[Finding]:
    """Look at the cluster that this process reaches: the job's kind, the step's rights, the queue.

    Args:
        run_on: A cluster target.
        where: What the findings are about: "train_fp8".
    """
    try:
        cluster = Cluster.connect(run_on.namespace)
    except (ValueError, ConnectionError, PermissionError, Refused) as fault:
        return [not_checked(f"{where} cluster", fault, "run preflight where a kubeconfig or a service account is")]
    place = f"{where} namespace {cluster.namespace}"
    return [*_kind(cluster, run_on, place), *_rights(cluster, run_on, place), *_queue(cluster, run_on, place)]


def _kind(cluster: Cluster, run_on: RunOn, where: str) -> Iterator[Finding]:
    kind = KINDS[run_on.target]
    try:
        cluster.resource(kind.api_version, kind.plural, HINTS[run_on.target])
    except ValueError as fault:
        yield error(where, fault)


def _rights(cluster: Cluster, run_on: RunOn, where: str) -> Iterator[Finding]:
    missing: dict[tuple[str, str], list[str]] = {}
    for rule in rules(run_on.target, queue=bool(run_on.queue)):
        (group,), (resource,) = rule["apiGroups"], rule["resources"]
        for verb in rule["verbs"]:
            try:
                if not cluster.may(verb, group, resource):
                    missing.setdefault((group, resource), []).append(verb)
            except (ConnectionError, PermissionError, Refused) as fault:
                yield not_checked(f"{where} rights", f"asking what the step may do was refused: {fault}")
                return
    for (group, resource), verbs in missing.items():
        what = f"{resource} of {group}" if group else resource
        rule_text = f"apiGroups [{group or chr(34) * 2}], resources [{resource}], verbs [{', '.join(verbs)}]"
        yield error(where, f"may not {', '.join(verbs)} {what}", f"bind the step's account to a Role with {rule_text}")


def _queue(cluster: Cluster, run_on: RunOn, where: str) -> Iterator[Finding]:
    if not run_on.queue:
        return
    try:
        queues = kueue(cluster, "localqueues")
    except ValueError as fault:
        yield error(where, fault)
        return
    try:
        found = cluster.get(queues, run_on.queue)
    except Refused as refusal:
        if refusal.status == 404:
            yield error(where, f"has no LocalQueue {run_on.queue}", "create it, or name one: kubectl get localqueues")
        else:
            yield not_checked(where, f"queue {run_on.queue}: {refusal}")
        return
    except (ConnectionError, PermissionError) as fault:
        yield not_checked(where, f"queue {run_on.queue}: {fault}")
        return
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Active" and condition["status"] == "False":
            words = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            yield warning(where, f"queue {run_on.queue} is not active ({words})", "jobs wait until it is")
