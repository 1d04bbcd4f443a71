"""What the pods of a job are given, whatever custom resource makes them: resources, environment, placement, volumes.

`plan` joins four sources, the later winning where two may speak: the instance type's table, the KFP task's
settings, `run_on`, and what every job needs (shared memory, restricted security, a place for the elastic
agent's files). Where a user contradicts himself, it raises instead of choosing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crosstrain.components.core.launch.instances import HYPERPOD_PREFIX, Instance, load_instances
from crosstrain.components.core.launch.job import Job, TaskConfig, refuse_reserved

EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGEPAGES_RESOURCE = "hugepages-2Mi"
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
HEALTH_LABEL, HEALTHY = "sagemaker.amazonaws.com/node-health-status", "Schedulable"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
JOB_LABEL = "app.kubernetes.io/instance"
"""Label of a job's pods; its value is the job's name."""
MANAGER_LABEL, MANAGER = "app.kubernetes.io/managed-by", "crosstrain"

LOG_PREFIX_VARIABLE, LOG_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: "
"""torchrun's prefix of every worker's line, so that one rank's lines can be told from a node's log."""

EVERY_JOB = {LOG_PREFIX_VARIABLE: LOG_PREFIX, "PYTHONUNBUFFERED": "1"}

SHARE_OF_NODE = 0.9
"""What a job asks of the instance's CPUs and memory; the rest is the kubelet's and the system pods'."""

CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

Mapped = dict[str, Any]


@dataclass(frozen=True)
class PodPlan:
    """The parts of a job's pods, as Kubernetes spells them; renderers put them in their places."""

    labels: dict[str, str]
    """Of the job object: queue, priority."""
    pod_labels: dict[str, str]
    annotations: dict[str, str]
    """Of the pods: topology."""
    image: str
    env: list[Mapped]
    resources: dict[str, dict[str, str]]
    volumes: list[Mapped]
    mounts: list[Mapped]
    placement: Mapped
    """nodeSelector, tolerations, affinity, serviceAccountName, imagePullSecrets: only those that are set."""
    security: Mapped
    """The pods' security context; with CONTAINER_SECURITY it passes the restricted Pod Security Standard."""
    processes: int
    """Training processes a node."""

    def container(self, name: str, command: list[str], ports: list[Mapped]) -> Mapped:
        """The container of a pod template, its arguments proof against Kubernetes' $(…) expansion."""
        made = {
            "name": name,
            "image": self.image,
            "command": literal(command),
            "env": self.env,
            "resources": self.resources,
            "volumeMounts": self.mounts,
            "securityContext": CONTAINER_SECURITY,
        }
        return {**made, "ports": ports} if ports else made

    def template(self, container: Mapped, grace_seconds: int) -> Mapped:
        """A pod template around the container."""
        metadata: Mapped = {"labels": self.pod_labels}
        if self.annotations:
            metadata["annotations"] = self.annotations
        return {
            "metadata": metadata,
            "spec": {
                **self.placement,
                "securityContext": self.security,
                "terminationGracePeriodSeconds": grace_seconds,
                "containers": [container],
                "volumes": self.volumes,
            },
        }


def literal(texts: Iterable[str]) -> list[str]:
    """Texts as they reach the process: Kubernetes reads `$(NAME)` in them unless the dollar is doubled."""
    return [text.replace("$(", "$$(") for text in texts]


def processes_per_node(job: Job) -> int:
    """Training processes a node: as asked, else one for each accelerator the job is given.

    Raises:
        ValueError: the instance type is not known.
    """
    run_on = job.run_on
    if run_on.processes_per_node or not run_on.instance_type:
        return run_on.processes_per_node or 1
    instance = load_instances(run_on.instances_file).find(run_on.instance_type)
    given = _device_counts(instance, run_on.resources, run_on.task_config)
    for name, count in instance.devices.items():
        return max(1, instance.processes * given[name] // count)
    return instance.processes


def plan(job: Job) -> PodPlan:
    """Join what the job's pods are given.

    Raises:
        ValueError: no image, an unknown instance type, or settings that contradict one another.
        FileNotFoundError: the user's file of instance types is not there.
    """
    run_on = job.run_on
    image = run_on.image or job.image
    if not image:
        raise ValueError(f"run_on.image: the target {run_on.target} needs a container image, and none was given")
    instances = load_instances(run_on.instances_file)
    instance = instances.find(run_on.instance_type) if run_on.instance_type else Instance(vcpus=1, memory_gib=1)
    volumes, mounts = _volumes(job, instance)
    labels = {JOB_LABEL: job.name, MANAGER_LABEL: MANAGER}
    topology = run_on.topology
    return PodPlan(
        labels={
            **labels,
            **({QUEUE_LABEL: run_on.queue} if run_on.queue else {}),
            **({PRIORITY_LABEL: run_on.priority} if run_on.priority else {}),
        },
        pod_labels=labels,
        annotations={f"kueue.x-k8s.io/podset-{topology.mode}-topology": topology.level} if topology else {},
        image=image,
        env=_env(job, instances.variables(instance, run_on.nodes)),
        resources=_resources(job, instance),
        volumes=volumes,
        mounts=mounts,
        placement=_placement(job),
        security=_security(job),
        processes=processes_per_node(job),
    )


def _env(job: Job, instance: Mapping[str, str]) -> list[Mapped]:
    run_on, task = job.run_on, {entry["name"]: entry for entry in job.run_on.task_config.env or ()}
    refuse_reserved(task)
    own: dict[str, Mapped] = {name: {"name": name, "value": text} for name, text in run_on.env.items()}
    for name, secret in run_on.secrets.items():
        own[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}
    _refuse_conflict("environment variable", task, own)
    joined = {name: {"name": name, "value": text} for name, text in instance.items()}
    joined |= {name: {"name": name, "value": text} for name, text in EVERY_JOB.items()} | task | own
    escaped = []
    for name in sorted(joined):
        entry = joined[name]
        escaped.append({**entry, "value": literal([entry["value"]])[0]} if name in run_on.env else entry)
    return escaped


def _device_counts(instance: Instance, resources: Mapping[str, str], task: TaskConfig) -> dict[str, int]:
    asked = {
        **((task.resources or {}).get("requests") or {}),
        **((task.resources or {}).get("limits") or {}),
        **resources,
    }
    return {name: int(asked.get(name, count)) for name, count in instance.devices.items()}


def _resources(job: Job, instance: Instance) -> dict[str, dict[str, str]]:
    """Requests and limits: equal for what cannot be overcommitted; CPUs are requested without a limit."""
    run_on, task = job.run_on, job.run_on.task_config.resources or {}
    requests: dict[str, str] = {}
    if run_on.instance_type:
        requests["cpu"] = str(int(instance.vcpus * SHARE_OF_NODE))
        requests["memory"] = f"{int(instance.memory_gib * SHARE_OF_NODE)}Gi"
    requests |= {name: str(count) for name, count in instance.devices.items()}
    if run_on.nodes > 1 and instance.efa:
        requests[EFA_RESOURCE] = str(instance.efa)
        if instance.hugepages:
            requests[HUGEPAGES_RESOURCE] = instance.hugepages
    limits = {name: size for name, size in requests.items() if name != "cpu"}
    task_limits, task_requests = dict(task.get("limits") or {}), dict(task.get("requests") or {})
    for given in (task_limits, task_requests):
        _refuse_conflict("resource", {name: str(size) for name, size in given.items()}, run_on.resources)
    limits |= {name: str(size) for name, size in task_limits.items()}
    requests |= {name: str(size) for name, size in {**task_limits, **task_requests}.items()}
    requests |= run_on.resources
    limits |= {name: size for name, size in run_on.resources.items() if name != "cpu" or "cpu" in limits}
    for name in set(requests) - set(limits) - {"cpu"}:
        limits[name] = requests[name]
    return {"limits": dict(sorted(limits.items())), "requests": dict(sorted(requests.items()))}


def _volumes(job: Job, instance: Instance) -> tuple[list[Mapped], list[Mapped]]:
    run_on, task = job.run_on, job.run_on.task_config
    shared: Mapped = {"medium": "Memory", "sizeLimit": run_on.shared_memory or instance.shared_memory}
    volumes: list[Mapped] = [{"name": "dshm", "emptyDir": shared}]
    mounts: list[Mapped] = [{"name": "dshm", "mountPath": "/dev/shm"}]
    claims: dict[str, str] = {}
    for volume in run_on.volumes:
        if volume.claim not in claims:
            claims[volume.claim] = f"claim-{len(claims)}"
            volumes.append({"name": claims[volume.claim], "persistentVolumeClaim": {"claimName": volume.claim}})
        mount: Mapped = {"name": claims[volume.claim], "mountPath": volume.path}
        mounts.append({**mount, **({"readOnly": True} if volume.read_only else {}),
                       **({"subPath": volume.sub_path} if volume.sub_path else {})})  # fmt: skip
    volumes += [dict(volume) for volume in task.volumes or ()]
    mounts += [dict(mount) for mount in task.volume_mounts or ()]
    for kind, key, entries in (("volume", "name", volumes), ("mount path", "mountPath", mounts)):
        seen = [entry[key] for entry in entries]
        if twice := sorted({name for name in seen if seen.count(name) > 1}):
            raise ValueError(f"{kind} {twice[0]!r} is given twice, by run_on and by the task, or by the launcher")
    return volumes, mounts


def _placement(job: Job) -> Mapped:
    run_on, task = job.run_on, job.run_on.task_config
    known = {}
    if run_on.instance_type:
        known[INSTANCE_LABEL] = run_on.instance_type
    if run_on.instance_type.startswith(HYPERPOD_PREFIX):
        known[HEALTH_LABEL] = HEALTHY
    selector: dict[str, str] = {}
    for source in (known, task.node_selector or {}, run_on.node_selector):
        _refuse_conflict("node label", selector, source)
        selector |= source
    own = [{name: value for name, value in one.model_dump().items() if value} for one in run_on.tolerations]
    tolerations = [*own, *(dict(one) for one in task.tolerations or () if one not in own)]
    placement = {
        "nodeSelector": dict(sorted(selector.items())),
        "tolerations": tolerations,
        "affinity": task.affinity,
        "serviceAccountName": run_on.service_account,
        "imagePullSecrets": [{"name": name} for name in run_on.image_pull_secrets],
    }
    return {name: value for name, value in placement.items() if value}


def _security(job: Job) -> Mapped:
    user = job.run_on.user_id
    context: Mapped = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {**context, **({"runAsUser": user, "runAsGroup": user} if user else {})}


def _refuse_conflict(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for name in sorted(set(first) & set(second)):
        if first[name] != second[name]:
            raise ValueError(f"{kind} {name!r} is given twice: {first[name]!r} and {second[name]!r}; keep one")
