"""What is launched and what comes back: the typed job, where it runs, and its result. Free of torch and Kubernetes.

`RunOn` is what a user writes (an option of the training components), `TaskConfig` is what KFP hands on of the
settings a user made on the task, `Job` is one program to run there, `JobResult` is how it went.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from crosstrain.components.core.config import FILLED, Config, NonNegativeInt, PositiveInt
from crosstrain.components.core.cost import Price

Target = Literal["local", "hyperpod", "trainjob", "pytorchjob"]

Seconds = PositiveInt

RESERVED = re.compile(
    r"PET_\w+|RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|NNODES|TORCHELASTIC_\w+"
)
"""Variables that the launchers set themselves; Kubeflow Trainer refuses jobs that set PET_*."""

NAME_LENGTH = 40
"""Longest job name: pods and services append to it, and labels end at 63 characters."""


class SecretKey(Config):
    """One key of a Secret in the job's namespace."""

    secret: str
    key: str


class Volume(Config):
    """A PersistentVolumeClaim (FSx for Lustre, for one) mounted into every process's container."""

    claim: str
    """Name of the claim in the job's namespace."""
    path: str
    """Where it is mounted: an absolute path."""
    read_only: bool = False
    sub_path: str = ""
    """Folder of the volume to mount; empty: its root."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("must be an absolute path")
        return value


class Toleration(Config):
    """A taint that the job's pods put up with, as Kubernetes spells it."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class Topology(Config):
    """Kueue's topology-aware placement of the job's nodes."""

    level: str
    """Node label that they shall share: `topology.k8s.aws/network-node-layer-3`."""
    mode: Literal["required", "preferred"] = "preferred"
    """required: wait for such nodes; preferred: take others when there are none."""


class Timeouts(Config):
    """How long each part of a job may take, in seconds; past it the job is deleted and the step fails."""

    queue: Seconds = 86_400
    """From creation to admission by the queue."""
    start: Seconds = 3_600
    """From admission until every node's container runs: scheduling and image pull."""
    run: Seconds = 604_800
    """From start to end, restarts included."""
    first_step: Seconds = 3_600
    """From a container's start to the first training step: loading, compilation. HyperPod restarts the job past it."""
    step: Seconds = 1_800
    """Between two step lines. HyperPod restarts the job past it."""
    rendezvous: Seconds = 1_800
    """How long nodes wait for one another, at the start and after a restart."""
    grace: Seconds = 120
    """Between SIGTERM and SIGKILL."""


class TaskConfig(Config):
    """Settings that a user made on the KFP task, as the cluster hands them on; Kubernetes' own spelling inside."""

    model_config = ConfigDict(populate_by_name=True)

    affinity: dict[str, Any] | None = None
    tolerations: tuple[dict[str, Any], ...] | None = None
    node_selector: dict[str, str] | None = Field(default=None, alias="nodeSelector")
    env: tuple[dict[str, Any], ...] | None = None
    volumes: tuple[dict[str, Any], ...] | None = None
    volume_mounts: tuple[dict[str, Any], ...] | None = Field(default=None, alias="volumeMounts")
    resources: dict[str, Any] | None = None

    def placement(self) -> list[str]:
        """Names of the settings that a step's own pod is not given, because KFP hands them on to a job."""
        names = ("resources", "tolerations", "node_selector", "affinity")
        return [name for name in names if getattr(self, name)]


class RunOn(Config):
    """Where a training program runs, and what it is given there."""

    target: Target = "local"
    """Where: this machine (local), or a cluster, as HyperPodPyTorchJob, Kubeflow TrainJob or Kubeflow PyTorchJob."""
    nodes: PositiveInt = 1
    """Machines."""
    processes_per_node: NonNegativeInt = 0
    """Training processes a node; 0: one for each accelerator (NeuronCore) of the instance type, else one."""
    instance_type: str = ""
    """`ml.p5.48xlarge` on HyperPod, `p5.48xlarge` on plain EC2 nodes; empty: any node."""
    instances_file: str = ""
    """A YAML file that adds instance types to the packaged table, or replaces them."""
    image: str = ""
    """Container image of the training processes; empty: the component's own."""
    namespace: str = ""
    """Kubernetes namespace of the job; empty: the step's own, which alone lets the job die with the step's pod."""
    queue: str = ""
    """Kueue LocalQueue; empty: none."""
    priority: str = ""
    """Kueue WorkloadPriorityClass; needs a queue."""
    topology: Topology | None = None
    """Kueue topology-aware placement; needs a queue."""
    runtime: str = "torch-distributed"
    """Name of the Kubeflow training runtime of a TrainJob."""
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    """Kind of the runtime."""
    service_account: str = ""
    """Service account of the training pods: what gives them access to object storage."""
    user_id: NonNegativeInt = 0
    """User and group id of the processes; 0: the image's own user, who must not be root."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets for pulling the image."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables; they win over those of the instance type."""
    secrets: dict[str, SecretKey] = Field(default_factory=dict)
    """Environment variables filled from Secrets: name to {secret, key}."""
    volumes: tuple[Volume, ...] = ()
    """Volume claims to mount."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints to put up with."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Further node labels that the nodes must carry."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Resources a node that replace those of the instance type: `memory`, `cpu`, `aws.amazon.com/neuroncore`…"""
    shared_memory: str = ""
    """Size of /dev/shm, as Kubernetes writes sizes; empty: as the instance type has it."""
    retries: NonNegativeInt = 3
    """How often a failed job on a cluster is restarted before the step fails."""
    keep_seconds: PositiveInt = 86_400
    """How long a finished job's object, status and logs stay."""
    timeouts: Timeouts = Timeouts()
    """Limits in seconds."""
    prices: dict[str, Price] = Field(default_factory=dict)
    """Prices by instance type, over the packaged ones: {usd_per_hour, source, date}; what the cost is counted with."""
    task_config: Annotated[TaskConfig, Field(json_schema_extra={"role": FILLED})] = TaskConfig()
    """Filled by KFP from the task's own settings; not for hand-writing."""

    @field_validator("env", "secrets")
    @classmethod
    def _unreserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_reserved(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.target == "local" and self.nodes > 1:
            raise ValueError("nodes: the target local is one machine; choose hyperpod, trainjob or pytorchjob")
        if self.target == "local" and (self.secrets or self.volumes):
            raise ValueError(
                "secrets and volumes belong to a cluster; on this machine set the variables and paths yourself"
            )
        if not self.queue and (self.priority or self.topology):
            raise ValueError("priority and topology belong to a Kueue queue; give queue too")
        if both := sorted(set(self.env) & set(self.secrets)):
            raise ValueError(f"{both[0]}: given both in env and in secrets")
        return self


def refuse_reserved(names: Any) -> None:
    """Raise a ValueError if a variable name is one that the launchers set themselves."""
    if taken := [name for name in names if RESERVED.fullmatch(name)]:
        raise ValueError(f"{taken[0]} is set by the launcher; leave it out")


class Job(Config):
    """One program to run as ranks: `python -m MODULE ARGUMENTS` on every process."""

    run: str
    """What tells this run from another: the step's output URI, which a retried step has again."""
    task: str
    """Name of the step: "train_fp8"."""
    module: str
    """Python module to run."""
    arguments: tuple[str, ...] = ()
    """Its arguments."""
    front: tuple[str, ...] = ()
    """Command that each node runs instead of its launcher (torchrun, hyperpodrun), whose command line it gets behind
    its own and runs in its turn; none: the launcher itself."""
    run_on: RunOn = RunOn()
    image: str = ""
    """The component's own image, for a `run_on` without one."""
    steps: NonNegativeInt = 0
    """Training steps it will report; 0: not known. HyperPod's hang detection ends with the last one."""

    @property
    def name(self) -> str:
        """The job's name, the same for the same run and task: a DNS label of at most 40 characters."""
        digest = hashlib.sha256(f"{self.run}\n{self.task}".encode()).hexdigest()[:10]
        slug = re.sub(r"[^a-z0-9]+", "-", self.task.lower()).strip("-")
        if not slug[:1].isalpha():
            slug = f"job-{slug}".rstrip("-")
        return f"{slug[: NAME_LENGTH - 11].rstrip('-')}-{digest}"


State = Literal["succeeded", "failed"]


@dataclass(frozen=True)
class Exit:
    """How one node's launcher ended, and the first of its ranks to fail where that is known."""

    node: int
    """Index of the node."""
    code: int
    """Exit status of the node's container, or of the local launcher."""
    rank: int | None = None
    """Global rank that failed first on this node."""
    rank_code: int | None = None
    """Its exit status; negative: killed by that signal."""
    reason: str = ""
    """Kubernetes' word for it: Completed, Error, OOMKilled…"""
    finished: float = 0.0
    """When, in seconds since the epoch."""


@dataclass(frozen=True)
class JobResult:
    """How a job went. Times are in seconds and part the job's life: queued, running, restarting."""

    name: str
    target: Target
    state: State
    reason: str = ""
    """Why it failed, on one line."""
    tail: tuple[str, ...] = ()
    """Last log lines of the first failing rank."""
    exits: tuple[Exit, ...] = ()
    nodes: int = 1
    processes_per_node: int = 1
    instance_type: str = ""
    seconds_queued: float = 0.0
    """From creation until every node ran for the first time: queue, scheduling, image pull."""
    seconds_running: float = 0.0
    """Every node running."""
    seconds_restarting: float = 0.0
    """Between a failure and every node running again."""
    restarts: int = 0

    def metrics(self) -> dict[str, float]:
        """What a component adds to its own metrics, for the cost report."""
        return {
            "nodes": float(self.nodes),
            "queue_seconds": self.seconds_queued,
            "run_seconds": self.seconds_running,
            "restart_seconds": self.seconds_restarting,
            "restarts": float(self.restarts),
        }


class JobFailed(RuntimeError):
    """The job did not succeed; `result` says how it went."""

    def __init__(self, result: JobResult) -> None:
        lines = [f"{result.target} job {result.name} failed: {result.reason}", *(f"  | {line}" for line in result.tail)]
        super().__init__("\n".join(lines))
        self.result = result
