"""A job as a HyperPodPyTorchJob, the custom resource of HyperPod's training operator.

The operator restarts failed processes, then the job, on healthy or spare nodes, and watches the step line for
hangs. Two defaults of its own would lose what a failure leaves behind, so both are set: pods are kept, and the
object stays after the end.

Rules of log monitoring are matched by `re.match` against the log of local rank 0 on every node: a program must
print its step line there, not on global rank 0 alone. The patterns keep to what Python and Go both read.
The operator has no public CRD; the shape is that of its vendor's client.
"""

from typing import Any

from crosstrain.components.core.launch.job import Job
from crosstrain.components.core.launch.plan import PodPlan
from crosstrain.components.core.launch.torchrun import program, shape

API_VERSION, PLURAL = "sagemaker.amazonaws.com/v1", "hyperpodpytorchjobs"
KIND = "HyperPodPyTorchJob"
"""As the vendor's documentation has it; the cluster's own spelling is asked for when a job is created."""

CONTAINER = "pytorch"
AGENT_PORT = 8080
AGENT_FOLDER = "/opt/ml/input/config"
"""The elastic agent writes here; images that do not run as root cannot make it."""

STEP_PATTERN = r".*crosstrain step=[0-9]+ total=[0-9]+ .*"
"""Matches the line of `telemetry.step_line`, whatever the log's prefix."""

RESTART_WINDOW_SECONDS = 3_600
PROCESS_RESTARTS = 3
"""Restarts of the processes within the window before the whole job is restarted."""


def render(job: Job, plan: PodPlan) -> dict[str, Any]:
    """The custom resource, without namespace and owner."""
    run_on, limits = job.run_on, job.run_on.timeouts
    container = plan.container(CONTAINER, _command(job, plan), [{"containerPort": AGENT_PORT}])
    container["env"] = [*container["env"], {"name": "NNODES", "value": str(run_on.nodes)}]
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "agent", "mountPath": AGENT_FOLDER}]
    template = plan.template(container, limits.grace)
    template["spec"]["volumes"] = [*template["spec"]["volumes"], {"name": "agent", "emptyDir": {}}]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": job.name, "labels": plan.labels},
        "spec": {
            "nprocPerNode": str(plan.processes),
            "replicaSpecs": [{"name": "pods", "replicas": run_on.nodes, "template": template}],
            "runPolicy": {
                "activeDeadlineSeconds": limits.run,
                "cleanPodPolicy": "None",
                "jobMaxRetryCount": run_on.retries,
                "logMonitoringConfiguration": _log_rules(job),
                "restartPolicy": {
                    "evalPeriodSeconds": RESTART_WINDOW_SECONDS,
                    "maxFullJobRestarts": run_on.retries,
                    "numRestartBeforeFullJobRestart": min(run_on.retries, PROCESS_RESTARTS),
                },
                "ttlSecondsAfterFinished": run_on.keep_seconds,
            },
        },
    }


def _command(job: Job, plan: PodPlan) -> list[str]:
    return [
        *job.front,
        "hyperpodrun",
        *shape(job.run_on.nodes, plan.processes),
        "--rdzv-backend=hyperpod",
        f"--server-port={AGENT_PORT}",
        "--shutdown-signal=SIGTERM",
        f"--shutdown-timeout={job.run_on.timeouts.grace}",
        *program(job),
    ]


def _log_rules(job: Job) -> list[dict[str, Any]]:
    limits = job.run_on.timeouts
    stop = {"stopPattern": f".*crosstrain step={job.steps} total={job.steps} .*"} if job.steps else {}
    return [
        {"name": "first-step", "logPattern": STEP_PATTERN, "expectedStartCutOffInSeconds": limits.first_step},
        {"name": "step", "logPattern": STEP_PATTERN, "expectedRecurringFrequencyInSeconds": limits.step, **stop},
    ]
