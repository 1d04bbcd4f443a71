"""A training component's step as a job: launched where its config says, its artifact and metrics taken from there.

The ranks write the artifact and its run.json; the step adds how the job went (queue, run, restarts) and what it
cost. None of that is in the manifest, which is the same wherever the work was done.
"""

import json
import logging
from dataclasses import asdict

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.config import Config
from crosstrain.components.core.cost import Cost, Timing, Unpriced, load_prices, step_cost
from crosstrain.components.core.launch.job import JobResult, RunOn
from crosstrain.components.core.launch.launcher import launch
from crosstrain.components.core.launch.own_job import own_job
from crosstrain.components.core.step import RECORD_NAME, Result

log = logging.getLogger(__name__)


def run_as_job(
    component: str, config: Config, image: str, steps: int = 0, front: tuple[str, ...] = ()
) -> Result | None:
    """Launch a component's program where `run_on` says, wait for it, and give what it made.

    Args:
        component: As for `own_job`, like the others.
        config: Its configuration.
        image: Container image of its own.
        steps: Training steps it will report.
        front: What each node runs in front of its launcher; see Job.

    Returns:
        The artifact that the ranks wrote, with the metrics of their run.json and the job's own beside them
        (JobResult.metrics, Cost.metrics); None when the program is to run in this process.

    Raises:
        JobFailed: the job did not succeed; the message ends with the first failing rank's last lines.
        ValueError, PermissionError: see `launch`; or it ended well and left no artifact.
    """
    job = own_job(component, config, image, steps)
    if job is None:
        return None
    done = launch(job.model_copy(update={"front": front}))
    try:
        artifact = Artifact.open(job.run)
        record = json.loads(artifact.store.read(RECORD_NAME))
    except FileNotFoundError as error:
        raise ValueError(
            f"{done.target} job {done.name} ended well and left no artifact at {job.run} ({error}): its processes "
            "write somewhere else; output must be object storage or a volume that the job mounts too"
        ) from None
    cost = job_cost(job.run_on, done, record["metrics"])
    log.info("cost: %s", cost.provenance())
    return Result(
        artifact,
        {**record["metrics"], **done.metrics(), **cost.metrics()},
        record["html"],
        record["markdown"],
        job={"result": asdict(done), "ranks": record, "cost": cost.provenance()},
    )


def job_cost(run_on: RunOn, done: JobResult, metrics: dict[str, float]) -> Cost | Unpriced:
    """What the job cost, by the ranks' own word on compiling and tokens.

    Args:
        run_on: Where it ran, with the user's prices.
        done: How it went.
        metrics: Of the ranks, where they tell them: compile_seconds, tokens_seen, and of these tokens_resumed, which
            an earlier job paid for unless this one was restarted.
    """
    wall = done.seconds_running + done.seconds_restarting
    timing = Timing(
        wall_seconds=wall,
        queue_seconds=done.seconds_queued,
        restart_seconds=done.seconds_restarting,
        compile_seconds=min(metrics.get("compile_seconds", 0.0), done.seconds_running),
    )
    prices = {**load_prices(), **run_on.prices}
    tokens = metrics.get("tokens_seen", 0) - (0 if done.restarts else metrics.get("tokens_resumed", 0))
    return step_cost(done.instance_type, done.nodes, timing, int(tokens), prices)
