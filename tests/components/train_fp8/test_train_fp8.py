"""train_fp8 end to end: what it writes, what it refuses before training, and what a kill does to it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.guard import Diverged
from crosstrain.components.core.manifest import CorpusFacts
from crosstrain.components.core.step import Result, execute
from crosstrain.components.train_fp8.config import Config

OPTIONS: dict[str, Any] = {
    "preset": "debug", "steps": 24, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 4,
    "learning_rate": 3e-3, "checkpoint_every": 6, "evaluate_every": 12, "threads": 1, "log_every": 6,
}  # fmt: skip

ODD = '{"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 4}'


def train(shards: str, output: Path | str, **options: Any) -> Result:
    return execute("train_fp8", Config.decode({**OPTIONS, "shards": shards, "output": str(output), **options}))


def in_process(shards: str, output: Path, before: str = "", **options: Any) -> "subprocess.Popen[str]":
    """Start the program in a process of its own, after running some code in it."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in {**OPTIONS, **options}.items()]
    arguments += [f"--shards={shards}", f"--output={output}"]
    code = f"{before}\nfrom crosstrain.components.core.step import main\nmain('train_fp8', {arguments!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def reference(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The model of an uninterrupted run in emulated fp8."""
    return train(shards, tmp_path_factory.mktemp("reference") / "model").artifact


def test_the_output_is_a_plain_model_folder_with_its_log(shards, reference):
    facts = reference.facts
    assert (facts.precision, facts.steps, facts.dtype) == ("fp8-torchao-emulated", 24, "float32")
    assert reference.manifest.inputs["shards"].sha256 == Artifact.open(shards).manifest.sha256
    folder = reference.fetch_all()
    model = LlamaForCausalLM.from_pretrained(folder)
    assert sum(item.numel() for item in model.parameters()) == facts.parameters
    assert len(AutoTokenizer.from_pretrained(folder)) == 2
    assert (model.config.eos_token_id, model.config.vocab_size) == (1, 96)
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[-1]["loss"] == facts.train_loss < rows[0]["loss"] - 0.5
    assert rows[-1]["tokens"] == facts.tokens_seen


def test_the_same_work_gives_the_same_bytes(shards, reference, tmp_path):
    again = train(shards, tmp_path / "model", log_every=1, keep_checkpoints=1)
    assert again.artifact.manifest.sha256 == reference.manifest.sha256


def test_metrics_claim_no_fp8_speed_on_a_cpu(shards, tmp_path):
    metrics = train(shards, tmp_path / "model", steps=3).metrics
    assert "tokens_per_second" not in metrics and metrics["emulation_tokens_per_second"] > 0
    wanted = {"train_loss", "validation_loss", "perplexity", "parameters", "tokens_seen", "peak_rss_bytes"}
    assert wanted <= set(metrics)
    assert metrics["perplexity"] == pytest.approx(2.718281828 ** metrics["validation_loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_control_arms(shards, tmp_path, reference, precision):
    result = train(shards, tmp_path / "model", precision=precision)
    assert result.artifact.facts.precision == precision
    assert "tokens_per_second" in result.metrics
    assert result.artifact.facts.train_loss == pytest.approx(reference.facts.train_loss, abs=0.05)


def test_it_works_on_an_object_store(shards, s3_uri, reference):
    result = train(shards, f"{s3_uri}/model", state=f"{s3_uri}/state")
    assert result.artifact.manifest.sha256 == reference.manifest.sha256


def corpus(tmp_path: Path) -> str:
    with ArtifactWriter(str(tmp_path / "corpus")) as writer:
        writer.commit("import_data", CorpusFacts(format="text"), {}, {})
    return str(tmp_path / "corpus")


def test_inputs_of_another_kind_or_absent_are_refused(tmp_path):
    with pytest.raises(ValueError, match="this is a corpus artifact, and a shards artifact is wanted"):
        train(corpus(tmp_path), tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json here"):
        train(str(tmp_path / "nothing"), tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "shape", "error", "words"),
    [
        ({}, {"sequence_length": 513, "documents": 100}, ValueError, "513 of the data is above the model's"),
        ({"model_config_json": ODD}, {}, ValueError, "hidden_size is 72; nearest: 64 or 80"),
        ({"fp8_keep_first": 1, "fp8_keep_last": 1}, {}, ValueError, "leaves none of 2"),
        ({"device": "cuda"}, {}, ValueError, "no CUDA device"),
        ({"output": "{file}/model"}, {}, PermissionError, "cannot write the output here"),
        ({"state": "{file}/state"}, {}, PermissionError, "cannot write"),
        ({"precision": "fp32", "on_divergence": "fallback"}, {}, ValueError, "no precision above fp32"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_training(make_shards, tmp_path, monkeypatch, options, shape, error, words):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: pytest.fail("training began"))
    if torch.cuda.is_available() and options.get("device") == "cuda":
        pytest.skip("this machine has a GPU")
    (tmp_path / "file").write_text("")
    options = {name: value.format(file=tmp_path / "file") if "{file}" in str(value) else value
               for name, value in options.items()}  # fmt: skip
    with pytest.raises(error, match=words):
        train(make_shards(**shape), options.pop("output", tmp_path / "model"), **options)


@pytest.mark.parametrize(
    ("world", "others", "words"),
    [
        ("8", {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "1 samples for 8 ranks"),
        ("2", {}, "WORLD_SIZE is 2, and RANK is not set"),
    ],
)
def test_ranks(make_shards, tmp_path, monkeypatch, world, others, words):
    for name, value in {"WORLD_SIZE": world, **others}.items():
        monkeypatch.setenv(name, value)
    shape = {"documents": 1, "lengths": (20, 30)} if world == "8" else {}
    with pytest.raises(ValueError, match=words):
        train(make_shards(**shape), tmp_path / "model")


def test_unknown_options_are_refused_and_help_needs_no_torch():
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        Config.decode({"shards": "a", "output": "b", "learning_rat": 1})
    code = "import sys; from crosstrain.components.train_fp8.config import Config; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    text = subprocess.check_output([sys.executable, "-m", "crosstrain.components.train_fp8", "--help"], text=True)
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_a_loss_that_blows_up_ends_the_run_and_leaves_a_checkpoint(shards, tmp_path):
    options = {"precision": "fp32", "learning_rate": 1e4, "clip_norm": 1e9, "warmup_steps": 0, "checkpoint_every": 1}
    with pytest.raises(Diverged, match="last good checkpoint is of step"):
        train(shards, tmp_path / "model", spike_limit=3.0, **options)
    assert not (tmp_path / "model" / "manifest.json").exists()
    assert list((tmp_path / "model.state").rglob("manifest.json"))


def kill_at(place: str) -> str:
    """Code that ends its process by SIGKILL at a place in the run."""
    return {
        "a step": """
from crosstrain.components.core import guard
real = guard.Guard.judge
calls = []
def judge(*args):
    calls.append(1)
    if len(calls) == 16: os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
guard.Guard.judge = judge
""",
        "the middle of a state file": """
from crosstrain.components.core.artifact import ArtifactWriter
real = ArtifactWriter.add
def add(self, local, path):
    if path.endswith(".distcp") and "step-00000012" in self.store.uri:
        os.truncate(local, os.path.getsize(local) // 2)
        real(self, local, path)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, local, path)
ArtifactWriter.add = add
""",
        "between state and manifest": """
from crosstrain.components.core.artifact import ArtifactWriter
real = ArtifactWriter.commit
def commit(self, component, facts, *rest):
    if getattr(facts, "step", 0) == 12: os.kill(os.getpid(), signal.SIGKILL)
    return real(self, component, facts, *rest)
ArtifactWriter.commit = commit
""",
        "the export": """
from crosstrain.components.core import model
def add_tokenizer(*args): os.kill(os.getpid(), signal.SIGKILL)
model.add_tokenizer = add_tokenizer
""",
    }[place].replace("\n", "import os, signal\n", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kept"),
    [("a step", 12), ("the middle of a state file", 6), ("between state and manifest", 6), ("the export", 24)],
)
def test_a_killed_run_ends_where_an_uninterrupted_one_does(shards, reference, tmp_path, place, kept):
    """SIGKILL in the third epoch; the torn checkpoint is not chosen; weights, log and manifest equal to the bit."""
    process = in_process(shards, tmp_path / "model", kill_at(place))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
    assert not (tmp_path / "model" / "manifest.json").exists()
    complete = sorted(path.parent.name for path in (tmp_path / "model.state").rglob("manifest.json"))
    assert complete[-1] == f"step-{kept:08d}"
    resumed = train(shards, tmp_path / "model")
    assert resumed.artifact.manifest.sha256 == reference.manifest.sha256
    assert resumed.artifact.read("model.safetensors") == reference.read("model.safetensors")
    assert not list((tmp_path / "model.state").rglob(".crosstrain-*")), "what the kill left is cleared away"


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_says_so(shards, tmp_path):
    process = in_process(shards, tmp_path / "model", "", steps=100_000, log_every=1)
    assert process.stdout is not None
    for line in process.stdout:
        if "crosstrain step=20 " in line:
            process.send_signal(signal.SIGTERM)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: stopped by SIGTERM after step") and "the same command goes on" in last


@pytest.mark.slow
def test_a_divergence_on_the_command_line_is_one_clear_line(shards, tmp_path):
    process = in_process(
        shards, tmp_path / "model", precision="fp32", learning_rate=1e4, clip_norm=1e9, warmup_steps=0, spike_limit=3.0
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: training diverged at step" in output.splitlines()[-1] and "Traceback" not in output
