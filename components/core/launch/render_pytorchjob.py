"""A job as a PyTorchJob of Kubeflow's training operator (v1), for clusters that have it.

All nodes are workers of an elastic job of fixed size: a restarted node joins the others again under the c10d
rendezvous, and rank 0 is the worker with index 0, because torch sorts nodes by host name. On HyperPod the
annotations ask for automatic resumption after a node's replacement, which works in the namespaces `kubeflow` and
`hyperpod*`.
"""

from typing import Any

from crosstrain.components.core.launch.job import Job
from crosstrain.components.core.launch.plan import PodPlan
from crosstrain.components.core.launch.torchrun import program, rendezvous, shape

API_VERSION, KIND, PLURAL = "kubeflow.org/v1", "PyTorchJob", "pytorchjobs"

CONTAINER = "pytorch"
PORT_NAME, PORT = "pytorchjob-port", 23456
"""The operator looks for this container and port by name."""


def render(job: Job, plan: PodPlan) -> dict[str, Any]:
    """The custom resource, without namespace and owner."""
    run_on, limits = job.run_on, job.run_on.timeouts
    container = plan.container(CONTAINER, _command(job, plan), [{"name": PORT_NAME, "containerPort": PORT}])
    worker = {
        "replicas": run_on.nodes,
        "restartPolicy": "OnFailure",
        "template": plan.template(container, limits.grace),
    }
    resume = {}
    if run_on.retries:
        resume = {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": str(run_on.retries),
        }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.name, "labels": plan.labels, **({"annotations": resume} if resume else {})},
        "spec": {
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "minReplicas": run_on.nodes,
                "maxReplicas": run_on.nodes,
                "maxRestarts": run_on.retries,
                "nProcPerNode": plan.processes,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
            "runPolicy": {
                "activeDeadlineSeconds": limits.run,
                "backoffLimit": run_on.retries,
                "cleanPodPolicy": "Running",
                "ttlSecondsAfterFinished": run_on.keep_seconds,
            },
        },
    }


def _command(job: Job, plan: PodPlan) -> list[str]:
    run_on = job.run_on
    return [
        *job.front,
        "torchrun",
        *shape(run_on.nodes, plan.processes),
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={job.name}-worker-0:{PORT}",
        f"--rdzv-id={job.name}",
        f"--rdzv-conf={rendezvous(run_on.timeouts.rendezvous)}",
        f"--max-restarts={run_on.retries}",
        *program(job),
    ]
