"""A component's program as ranks: the configuration reaches them whole, and says nothing of where they run."""

import pytest

from crosstrain.components.core.config import Config, InputURI, OutputURI, parse_arguments
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.own_job import Placement, own_job


class Training(Config):
    """Stands for a training component's configuration."""

    shards: InputURI
    output: OutputURI
    learning_rate: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    note: str = ""
    run_on: Placement = RunOn()


def config(**run_on: object) -> Training:
    values = {"shards": "s3://a/shards", "output": "s3://a/out", "learning_rate": 1e-5, "note": "$(HOME) {x} ü"}
    return Training.decode({**values, "run_on": run_on})


def test_one_local_process_needs_no_job():
    assert own_job("train_fp8", config(), image="i") is None


def test_ranks_get_the_configuration_without_the_place():
    job = own_job("train_fp8", config(target="trainjob", nodes=2), image="i", steps=7)
    assert job is not None and job.module == "crosstrain.components.train_fp8" and job.steps == 7
    read = parse_arguments(Training, "train_fp8", job.arguments)
    assert read == config() and own_job("train_fp8", read, image="i") is None
    assert own_job("train_fp8", config(processes_per_node=2), image="i") is not None


def test_where_it_runs_is_no_part_of_the_work():
    assert config().options() == config(target="trainjob", nodes=2).options()
    here, there = (own_job("t", config(target="trainjob", nodes=nodes), image="i") for nodes in (1, 2))
    assert here is not None and there is not None and here.name == there.name


@pytest.mark.parametrize("setting", ["resources", "node_selector", "affinity", "tolerations"])
def test_settings_of_the_task_that_would_be_lost_are_refused(setting):
    """KFP gives them to no pod: a step that trains in its own would run without the GPU it was given."""
    value = [{"key": "a"}] if setting == "tolerations" else {"a": "b"}
    given = config(task_config={setting: value, "env": [{"name": "A", "value": "1"}]})
    with pytest.raises(ValueError, match=rf"none of the task's settings \({setting}\).*choose trainjob"):
        own_job("train_fp8", given, image="i")
    assert own_job("train_fp8", config(task_config={"env": [{"name": "A", "value": "1"}]}), image="i") is None
