"""The one call that runs a job where it says."""

import logging

from crosstrain.components.core.launch.job import Job, JobResult

log = logging.getLogger(__name__)


def launch(job: Job) -> JobResult:
    """Run the job on this machine or on a cluster, and wait for its end.

    The logs of the first rank go to standard output. SIGTERM and SIGINT end the job first. On a cluster a step
    that is run again finds the job by its name and goes on with it.

    Raises:
        JobFailed: it did not succeed; the message ends with the first failing rank's last lines.
        ValueError: the job or the cluster lacks something; the message says what.
        PermissionError: the step's service account lacks a right; the message names it.
    """
    if job.run_on.target == "local":
        from crosstrain.components.core.launch.local import run_local

        return run_local(job)
    from crosstrain.components.core.launch.cluster import Cluster
    from crosstrain.components.core.launch.lifecycle import run_on_cluster

    cluster = Cluster.connect(job.run_on.namespace)
    log.info("%s %s in namespace %s", job.run_on.target, job.name, cluster.namespace)
    return run_on_cluster(job, cluster)
