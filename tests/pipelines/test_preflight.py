"""`crosstrain preflight` as a process, and the first step of a pipeline: every finding, and the status that says it."""

import os
from pathlib import Path

import pytest
import yaml

from crosstrain.pipelines import spec

RUNS = Path(__file__).resolve().parents[2] / "manifests" / "overlays" / "hyperpod" / "runs"


@pytest.fixture
def run_file(tmp_path):
    """A function that writes a run file of a small sound run with some parameters changed."""
    for name in ("corpus", "tuning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "a"}\n')

    def write(**changed: object) -> Path:
        values = {"corpus": str(tmp_path / "corpus"), "tuning_corpus": str(tmp_path / "tuning"), **changed}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"name": "r", "parameters": values}))
        return tmp_path / "run.yaml"

    return write


def test_a_sound_run_passes(crosstrain, run_file, tmp_path):
    done = crosstrain("preflight", "-f", run_file(), "--root", tmp_path / "root")
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr.strip() == "preflight of pretrain-finetune: 0 errors, 0 warnings, 0 not checked"
    assert not list((tmp_path / "root").rglob("*.*"))


def test_where_artifacts_go_is_not_guessed(crosstrain, run_file):
    done = crosstrain("preflight", "-f", run_file())
    assert done.returncode == 0
    assert done.stdout.startswith("not checked: storage of artifacts: ") and "--root" in done.stdout


def test_every_fault_is_told_and_the_status_is_one(crosstrain, run_file, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    config = {"train_fp8": {"run_on": {"target": "hyperpod", "instance_type": "ml.p4d.24xlarge", "namespace": "n"}},
              "shard": {"sed": 1}}  # fmt: skip
    file = run_file(tuning_corpus=str(tmp_path / "none"), config=config)
    done = crosstrain("preflight", "-f", file, "--root", tmp_path / "root")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr.endswith("not checked\n")
    for words in (
        "error: shard: sed: unknown option", "error: storage of tuning_corpus", "no FP8 arithmetic",
        "names no registry", "not checked: train_fp8 cluster",
    ):  # fmt: skip
        assert [line for line in lines if words in line], words


def test_what_cannot_be_checked_at_all_is_refused(crosstrain, run_file, tmp_path):
    done = crosstrain("preflight", "-f", run_file(corpus=None))
    assert done.returncode == 2 and "corpus" in done.stderr
    done = crosstrain("preflight", "-f", tmp_path / "none.yaml")
    assert done.returncode == 2 and "no such run file" in done.stderr


def test_the_example_of_hyperpod_lacks_only_what_is_the_users(crosstrain, tmp_path, monkeypatch):
    """Images that nobody has published, a bucket and a cluster: nothing about the run itself."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("KUBECONFIG", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = crosstrain("preflight", "-f", RUNS / "pretrain-8b.yaml")
    told = [line for line in done.stdout.splitlines() if not line.startswith("not checked")]
    assert len(told) == 3, told
    assert "no S3 credentials" in told[0] and "names no registry" in told[1] and "names no registry" in told[2]


@pytest.mark.parametrize("name", spec.committed())
def test_it_is_the_first_step_and_every_other_comes_after_it(name):
    pipeline = spec.load(name)
    tasks = pipeline.document["root"]["dag"]["tasks"]
    first = next(task.component for task in pipeline.tasks({}))
    assert first == "preflight" and not tasks["preflight"].get("dependentTasks")
    assert all(task.get("dependentTasks") for key, task in tasks.items() if key != "preflight")
    assert not tasks["preflight"].get("cachingOptions", {}).get("enableCache")


def test_a_run_ends_at_its_first_step(crosstrain, run_file, tmp_path):
    done = crosstrain(
        "run", "pretrain_finetune", "-f", run_file(corpus=str(tmp_path / "none")), "--out", tmp_path / "o"
    )
    assert done.returncode == 1
    assert "storage of corpus" in done.stdout + done.stderr and "nothing is there" in done.stdout + done.stderr
