"""The run files of an overlay are what the steps take: each step's own configuration, and the job it would launch.

`RENEW_GOLDEN=1 pytest tests/manifests/test_runs.py` writes the golden file anew.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.components import images
from crosstrain.components.core.config import Config, parse_arguments
from crosstrain.components.core.launch.own_job import own_job
from crosstrain.components.core.launch.render import IDENTITY_ANNOTATION, render
from crosstrain.components.core.step import load_config, select_options
from crosstrain.pipelines import parameters, run_file, spec

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "manifests" / "overlays" / "hyperpod" / "runs"
GOLDEN = ROOT / "tests" / "golden" / "manifests" / "runs"
STEPS = {"train_fp8": {"shards": "s3://lake/shards"}, "finetune_lora": {"model": "s3://lake/m", "data": "s3://lake/d"}}


def configurations(path: Path) -> Iterator[tuple[str, Config]]:
    """Each training step's configuration, as the step itself decodes it."""
    pipeline = spec.load("pretrain_finetune")
    values = parameters.fill(pipeline, parameters.collect(pipeline, run_file.read(path).parameters, []))
    for task in pipeline.tasks(values):
        if inputs := STEPS.get(task.component):
            given = {name: value for name, value in task.parameters.items() if name != "config"}
            options = select_options(task.component, task.parameters["config"], given)
            config = load_config(task.component)
            yield task.component, config.decode({**options, **inputs, "output": "s3://lake/out"}, task.component)


def test_the_hyperpod_run_renders_the_jobs_we_expect(validate: Callable[[Any], None]) -> None:
    made = {}
    for component, config in configurations(RUNS / "pretrain-8b.yaml"):
        job = own_job(component, config, images.GPU, config.model_dump()["steps"])
        assert job is not None
        rendered = json.loads(json.dumps(render(job)))
        validate(rendered)
        (replicas,) = rendered["spec"]["replicaSpecs"]
        command = replicas["template"]["spec"]["containers"][0]["command"]
        read = parse_arguments(load_config(component), component, command[-2:])
        assert read.model_dump(exclude={"run_on"}) == config.model_dump(exclude={"run_on"}), "the ranks' configuration"
        command[-1] = "the configuration"  # grows with every option of a component
        del rendered["metadata"]["annotations"][IDENTITY_ANNOTATION]
        made[component] = rendered
    text = yaml.safe_dump(made, sort_keys=False, width=120)
    path = GOLDEN / "pretrain-8b.yaml"
    if os.environ.get("RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_trainium_gets_the_image_and_the_processes_of_trainium() -> None:
    jobs = {name: own_job(name, config, images.GPU) for name, config in configurations(RUNS / "pretrain-8b.yaml")}
    gpu, neuron = jobs["train_fp8"], jobs["finetune_lora"]
    assert gpu is not None and gpu.image == images.GPU
    assert neuron is not None and neuron.image == images.NEURON
    (replicas,) = render(neuron)["spec"]["replicaSpecs"]
    container = replicas["template"]["spec"]["containers"][0]
    assert render(neuron)["spec"]["nprocPerNode"] == "32" and container["image"] == images.NEURON
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "16"


def test_a_fault_in_a_run_file_is_found_before_anything_runs(tmp_path: Path) -> None:
    text = (RUNS / "pretrain-8b.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("queue: crosstrain", "qeue: crosstrain", 1))
    with pytest.raises(ValueError, match=r"run_on\.qeue: unknown option"):
        list(configurations(tmp_path / "run.yaml"))
