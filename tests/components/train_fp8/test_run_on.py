"""The same face with other parameters: two processes on this machine, started by the step itself."""

import json
from types import SimpleNamespace

import pytest
from kfp import dsl

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import DATA_SUFFIX
from crosstrain.components.train_fp8.component import train_fp8

OPTIONS = {"global_batch_size": 4, "micro_batch_size": 2, "threads": 1, "evaluate_batches": 1, "warmup_steps": 1}


def test_two_processes_from_the_face_to_its_metrics(shards, tmp_path, capfd):
    (tmp_path / f"shards{DATA_SUFFIX}").symlink_to(shards)
    logged: dict[str, dict[str, float]] = {}
    for name, run_on in (("one", {}), ("two", {"processes_per_node": 2})):
        output = SimpleNamespace(uri=str(tmp_path / name), path=str(tmp_path / "kfp" / name), metadata={})
        logged[name] = {}
        train_fp8.python_func(
            shards=SimpleNamespace(uri=str(tmp_path / "shards")), model=output,
            metrics=SimpleNamespace(log_metric=logged[name].__setitem__), task_config=dsl.TaskConfig(),
            preset="debug", precision="fp32", steps=3, config={**OPTIONS, "run_on": run_on},
        )  # fmt: skip
        assert Artifact.open(output.uri + DATA_SUFFIX).manifest.sha256 == output.metadata["sha256"]
    assert logged["two"]["train_loss"] == pytest.approx(logged["one"]["train_loss"], rel=1e-5)
    assert logged["two"]["nodes"] == 1 and logged["two"]["run_seconds"] > 0 and "nodes" not in logged["one"]
    assert "cost_usd" not in logged["two"], "nobody said what this machine costs"
    record = json.loads((tmp_path / f"two{DATA_SUFFIX}" / "run.json").read_text())
    assert record["job"]["result"]["processes_per_node"] == 2
    assert record["job"]["cost"] == "no cost: the instance type is not known"
    printed = capfd.readouterr().out
    assert printed.count("crosstrain step=3 total=3") == 2, "once a run: rank 0 alone tells"
