"""A component's own program as the ranks of a job: what a training component calls to run where its config says.

The ranks get the component's configuration without `run_on`, so that they train where they are; where the work
runs is no part of what it is, and the manifest they write does not tell.
"""

import json
from typing import Annotated

from pydantic import Field

from crosstrain.components import images
from crosstrain.components.core.config import OUTPUT, RUNTIME, Config
from crosstrain.components.core.launch.instances import load_instances
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.plan import processes_per_node

Placement = Annotated[RunOn, Field(json_schema_extra={"role": RUNTIME})]
"""Type of a component's field `run_on`."""

NEURON_RESOURCES = "aws.amazon.com/neuron"
"""How the resources of Trainium's device plugin begin."""


def own_job(component: str, config: Config, image: str, steps: int = 0) -> Job | None:
    """The job that runs a component's program elsewhere or in several processes; None: run it in this process.

    Args:
        component: Folder name: "train_fp8".
        config: Its configuration, with a field `run_on` of type Placement.
        image: Container image for a `run_on` without one, on nodes without NeuronCores.
        steps: Training steps it will report, for hang detection.

    Raises:
        ValueError: `run_on` names an unknown instance type, or the KFP task has settings and nothing to apply them to.
    """
    run_on: RunOn = getattr(config, "run_on")  # noqa: B009, the base class has no such field
    (output,) = (getattr(config, name) for name in config.uris(OUTPUT))
    values = config.model_dump(mode="json", exclude={"run_on"})
    job = Job(
        run=output,
        task=component,
        module=f"crosstrain.components.{component}",
        arguments=("--config", json.dumps(values, sort_keys=True)),
        run_on=run_on,
        image=own_image(run_on, image),
        steps=steps,
    )
    if run_on.target != "local":
        return job
    if unused := run_on.task_config.placement():
        raise ValueError(
            f"run_on.target: local trains in the step's own pod, which KFP gives none of the task's settings "
            f"({', '.join(unused)}): they go to the job that the step launches; choose trainjob, hyperpod or "
            "pytorchjob (nodes: 1 is enough), or take them off the task"
        )
    return None if processes_per_node(job) == 1 else job


def own_image(run_on: RunOn, image: str) -> str:
    """The image for a `run_on` without one: the component's own, on NeuronCores Trainium's.

    Raises:
        ValueError: an unknown instance type.
    """
    if not run_on.instance_type:
        return image
    instance = load_instances(run_on.instances_file).find(run_on.instance_type)
    return images.NEURON if any(name.startswith(NEURON_RESOURCES) for name in instance.devices) else image
