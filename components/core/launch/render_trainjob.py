"""A job as a TrainJob of Kubeflow Trainer (v2), on a runtime with the torch policy.

What the runtime's `node` container runs, with how many processes, goes into `trainer`; everything about its pods
goes into a runtime patch, which may name no new container and no variable. The processes a node are always
given: Trainer counts them from resources named "gpu" only, so that Trainium would get one process a CPU.

Trainer tells the container its rank and the first node's address in PET_* variables, which a job must not set
but may read. torchrun's own guess of who hosts the rendezvous compares host names and misses the JobSet's
short one, so a line of shell says it by rank. How often nodes restart is the runtime's to say (the Job's
backoffLimit, the JobSet's failurePolicy); `retries` restarts processes.
"""

import shlex
from typing import Any

from crosstrain.components.core.launch.job import Job
from crosstrain.components.core.launch.plan import CONTAINER_SECURITY, PodPlan, literal
from crosstrain.components.core.launch.torchrun import program, rendezvous, shape

API_VERSION, KIND, PLURAL = "trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs"

CONTAINER = REPLICATED_JOB = "node"
"""Names that Trainer gives the training container and its replicated job in every runtime."""

PATCH_MANAGER = "crosstrain/launch"

SCRIPT = (
    'if [ "$PET_NODE_RANK" = 0 ]; then host=true; else host=false; fi; '
    'exec {launcher} --rdzv-endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT" --rdzv-conf="is_host=$host,$0" "$@"'
)
"""Run by `sh -c` with the rendezvous settings as $0 and the rest of torchrun's line as its arguments; what stands in
front of torchrun is filled in."""


def render(job: Job, plan: PodPlan) -> dict[str, Any]:
    """The custom resource, without namespace and owner."""
    run_on = job.run_on
    metadata: dict[str, Any] = {"labels": plan.pod_labels}
    if plan.annotations:
        metadata["annotations"] = plan.annotations
    pod = {
        **plan.placement,
        "securityContext": plan.security,
        "terminationGracePeriodSeconds": run_on.timeouts.grace,
        "containers": [{"name": CONTAINER, "securityContext": CONTAINER_SECURITY, "volumeMounts": plan.mounts}],
        "volumes": plan.volumes,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.name, "labels": plan.labels},
        "spec": {
            "activeDeadlineSeconds": run_on.timeouts.run,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": run_on.runtime_kind,
                "name": run_on.runtime,
            },
            "trainer": {
                "image": plan.image,
                "command": ["sh", "-c", SCRIPT.replace("{launcher}", shlex.join([*job.front, "torchrun"]))],
                "args": literal(_arguments(job, plan)),
                "env": plan.env,
                "numNodes": run_on.nodes,
                "numProcPerNode": plan.processes,
                "resourcesPerNode": plan.resources,
            },
            "runtimePatches": [
                {
                    "manager": PATCH_MANAGER,
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": REPLICATED_JOB,
                                        "template": {"spec": {"template": {"metadata": metadata, "spec": pod}}},
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }


def _arguments(job: Job, plan: PodPlan) -> list[str]:
    run_on = job.run_on
    return [
        rendezvous(run_on.timeouts.rendezvous),
        *shape(run_on.nodes, plan.processes),
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.name}",
        f"--max-restarts={run_on.retries}",
        *program(job),
    ]
