"""The step around optimum-neuron, all of it but the library, whose training is replaced by a checkpoint it once cut."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.data import IGNORE, BatchPlan, Sample
from crosstrain.components.core.launch import run_job
from crosstrain.components.core.launch.job import Job, JobResult
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.finetune_lora.neuron import backend, run
from crosstrain.components.finetune_lora.neuron.samples import Ordered, collate

SHAPE = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
OPTIONS = {"backend": "optimum_neuron", "rank": 2, "alpha": 4, "steps": 4, "global_batch_size": 4,
           "micro_batch_size": 2, "neuron": {"tensor_parallel": 4}, "run_on": {"processes_per_node": 4}}  # fmt: skip


@pytest.fixture
def model(save_model, import_model, tmp_path) -> Artifact:
    return import_model(save_model(tmp_path / "base", **SHAPE))


def test_a_rank_imports_nothing_that_its_image_lacks():
    """The image's torch is 2.8: no loop, checkpoints or formats of the plain backend; nor its libraries."""
    code = (
        "import sys, importlib; from crosstrain.components.core.step import load_program;"
        "load_program('finetune_lora'); importlib.import_module('crosstrain.components.finetune_lora.neuron.run');"
        "core = 'crosstrain.components.core.';"
        "absent = [core + 'checkpoint', core + 'training', core + 'parallel.engine', core + 'precision', 'peft',"
        " 'optimum', 'kfp', 'matplotlib'];"
        "print([name for name in absent if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Trainium:
    """Runs a job's first rank here; the others have nothing that this rank does not have."""

    def __init__(self, committed: Path) -> None:
        self.committed = committed
        self.jobs: list[Job] = []
        self.works: list[backend.Work] = []
        self.spoil: Callable[[Path], None] = lambda folder: None

    def launch(self, job: Job) -> JobResult:
        self.jobs.append(job)
        trial = "--compile" in job.front
        ranks = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", **({run.TRIAL: "1"} if trial else {})}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ranks.items():
                patch.setenv(name, value)
            config = load_config(job.task).decode(json.loads(job.arguments[1]))
            if trial:
                with pytest.raises(SystemExit) as ended:
                    execute(job.task, config)
                assert ended.value.code == 0
            else:
                execute(job.task, config)
        return JobResult(job.name, "local", "succeeded", processes_per_node=4)

    def train(self, work: backend.Work, publish: Callable[..., None]) -> backend.Trained:
        self.works.append(work)
        if work.trial:
            return backend.Trained()
        history = [{"step": step, "loss": 3.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": step}
                   for step in range(1, 5)]  # fmt: skip
        for step in (2, 4):
            folder = Path(os.environ["CROSSTRAIN_TEST_NODE"]) / f"checkpoint-{step}"
            shutil.copytree(self.committed / "checkpoint-4", folder)
            (folder / "optimizer.pt").write_bytes(b"not wanted")
            self.spoil(folder)
            publish(folder, step, history[:step])
        return backend.Trained(history, 1)


@pytest.fixture
def trainium(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainium:
    made = Trainium(request.config.rootpath / "tests/data/neuron")
    monkeypatch.setenv("CROSSTRAIN_TEST_NODE", str(tmp_path / "node"))
    monkeypatch.setattr(run_job, "launch", made.launch)
    monkeypatch.setattr(run, "launch", made.launch)
    monkeypatch.setattr(backend, "train", made.train)
    monkeypatch.setattr(backend, "gather_over_ranks", lambda: lambda value: [value])
    return made


def test_the_ranks_checkpoint_becomes_the_adapter_after_the_job(model, corpus, finetune, pairs, trainium, tmp_path):
    result = finetune(model, corpus(pairs), **OPTIONS)
    facts = result.artifact.facts
    assert (facts.method, facts.rank, facts.steps, facts.base_sha256) == ("lora", 2, 4, model.manifest.sha256)
    assert {file.path for file in result.artifact.manifest.files} == {
        "adapter_config.json", "adapter_model.safetensors", "training_log.jsonl",
    }  # fmt: skip
    assert len(result.artifact.read("training_log.jsonl").splitlines()) == 4
    shards = Artifact.open(str(tmp_path / "adapter.shards"), "checkpoint")
    assert shards.facts.step == 4
    assert not [file.path for file in shards.manifest.files if "optimizer" in file.path or "checkpoint-2" in file.path]
    assert Artifact.open(f"{shards.uri}/checkpoint-2", "checkpoint").facts.step == 2
    (job,) = trainium.jobs
    assert job.front == () and "run_on" not in json.loads(job.arguments[1])
    values = {"model": model.uri, "adapter": result.artifact.uri, "output": str(tmp_path / "merged")}
    assert execute("merge", load_config("merge").decode(values)).metrics["merged_tensors"] == 14


def test_it_is_done_once_and_state_says_where_the_ranks_write(model, corpus, finetune, pairs, trainium, tmp_path):
    data = corpus(pairs)
    first = finetune(model, data, **OPTIONS, state=str(tmp_path / "state"))
    again = finetune(model, data, **OPTIONS, state=str(tmp_path / "state"))
    assert first.artifact.manifest.sha256 == again.artifact.manifest.sha256 and len(trainium.jobs) == 1
    (folder,) = (tmp_path / "state").iterdir()
    assert Artifact.open(str(folder), "checkpoint").facts.run_key == folder.name


def test_graphs_are_compiled_in_a_job_of_their_own_once(model, corpus, finetune, pairs, trainium, tmp_path):
    data, cache = corpus(pairs), str(tmp_path / "graphs")
    result = finetune(model, data, "one", **OPTIONS, compile_cache=cache)
    compiling, training = trainium.jobs
    wrapper = (sys.executable, "-m", "crosstrain.components.core.neuron.compile_cache", "--cache", cache)
    assert compiling.front == (*wrapper, "--compile", "--") and training.front == (*wrapper, "--")
    assert compiling.name != training.name and compiling.arguments == training.arguments
    assert compiling.run_on.timeouts.step == compiling.run_on.timeouts.run and compiling.steps == 0
    assert [work.trial for work in trainium.works] == [True, False] and result.metrics["compile_seconds"] > 0
    shutil.rmtree(tmp_path / "node")
    again = finetune(model, data, "two", **{**OPTIONS, "seed": 5}, compile_cache=cache)
    assert len(trainium.jobs) == 3 and "compile_seconds" not in again.metrics
    shutil.rmtree(tmp_path / "node")
    finetune(model, data, "three", **{**OPTIONS, "dropout": 0.1}, compile_cache=cache)
    assert len(trainium.jobs) == 5  # other graphs


def test_what_cannot_work_is_refused_before_any_job(model, corpus, shards, finetune, pairs, trainium):
    data = corpus(pairs)
    for options, words in [
        ({"method": "dora"}, "plain LoRA would come out under DoRA's name"),
        ({"neuron": {"tensor_parallel": 3}}, "4 processes do not divide"),
        ({"run_on": {}}, "trains in several processes"),
        ({"run_on": {"processes_per_node": 3}, "neuron": {"tensor_parallel": 3}}, "3 is no multiple of the model's 2"),
        ({"target_modules": ["q_proj"]}, "name all of them or none"),
    ]:
        with pytest.raises(ValueError, match=words):
            finetune(model, data, **{**OPTIONS, **options})
    with pytest.raises(ValueError, match="shards hold several documents"):
        finetune(model, shards(model), **OPTIONS)
    assert not trainium.jobs


def test_an_adapter_that_is_not_what_was_asked_for_does_not_exist(model, corpus, finetune, pairs, trainium, tmp_path):
    with pytest.raises(ValueError, match=r"rank 2 on .* was trained, and rank 8"):
        finetune(model, corpus(pairs), **{**OPTIONS, "rank": 8})
    assert not (tmp_path / "adapter" / "manifest.json").exists()


def test_a_last_checkpoint_that_lacks_a_rank_fails_the_step(model, corpus, finetune, pairs, trainium):
    def lose(folder: Path) -> None:
        (folder / "adapter_default/adapter_shards/model/dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()

    trainium.spoil = lose
    with pytest.raises(FileNotFoundError, match="lacks 1 of 4 shards"):
        finetune(model, corpus(pairs), **OPTIONS)


def test_rows_are_padded_and_come_in_the_order_of_every_backend(model, corpus, finetune, pairs, trainium):
    finetune(model, corpus(pairs), **OPTIONS, sequence_length=64)
    (work,) = trainium.works
    samples = work.samples
    assert len(samples) == 16 and work.length == 64 and not work.trial
    plan = BatchPlan(len(pairs), 4, 0)
    first, second = samples[0], samples[5]
    assert {name: tuple(item.shape) for name, item in first.items()} == {
        "input_ids": (64,), "labels": (64,), "attention_mask": (64,),
    }  # fmt: skip
    size = int(first["attention_mask"].sum())
    assert 0 < size < 64 and (first["labels"][size:] == IGNORE).all() and (first["labels"][:size] != IGNORE).any()
    rows = [Sample(np.full(3, number), np.full(3, number), np.arange(3)) for number in range(len(pairs))]
    order = [int(item["input_ids"][0]) for item in Ordered(rows, plan, 4, 4, pad=0)]
    assert order == [int(index) for step in range(4) for index in plan.indices(step)]
    assert collate([first, second])["labels"].shape == (2, 64)
    assert samples.tokens(1) == sum(int(samples[place]["attention_mask"].sum()) for place in range(4))


def test_packing_puts_rows_into_fewer_sequences(model, corpus, finetune, pairs, trainium):
    finetune(model, corpus(pairs), **{**OPTIONS, "neuron": {"tensor_parallel": 4, "packing": True}},
             sequence_length=128)  # fmt: skip
    (work,) = trainium.works
    filled = [int(work.samples[place]["attention_mask"].sum()) for place in range(len(work.samples))]
    assert max(filled) > 64, "several rows in one"
