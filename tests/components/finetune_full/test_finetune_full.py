"""Full fine-tuning: every weight moves, the data are learned, the output is a plain model, a wrong input is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config

OPTIONS = {
    "steps": 6, "seed": 3, "learning_rate": 3e-3, "warmup_steps": 1, "threads": 1, "micro_batch_size": 4,
    "global_batch_size": 4, "evaluate_every": 3, "evaluate_batches": 2, "checkpoint_every": 3,
}  # fmt: skip


def step(component: str, **values: Any) -> Result:
    return execute(component, load_config(component).decode(values))


@pytest.fixture
def base(save_model: Callable[..., Path], tmp_path: Path) -> Artifact:
    folder = save_model(tmp_path / "base")
    return step("import_model", source=str(folder), output=str(tmp_path / "base-artifact")).artifact


@pytest.fixture
def shards(base: Artifact, tmp_path: Path) -> Artifact:
    lines = [json.dumps({"text": f"def add{n}(a, b):\n    return a + b\n" * 3}) for n in range(120)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    corpus = step("import_data", source=str(tmp_path / "corpus.jsonl"), output=str(tmp_path / "corpus")).artifact
    tokens = step(
        "tokenize", corpus=corpus.uri, tokenizer=base.uri, workers=1, output=str(tmp_path / "tokens")
    ).artifact
    return step(
        "shard", tokens=tokens.uri, sequence_length=32, validation_fraction=0.1, output=str(tmp_path / "shards")
    ).artifact


@pytest.fixture
def tune(base: Artifact, shards: Artifact, tmp_path: Path) -> Callable[..., Result]:
    def run(name: str = "tuned", **options: Any) -> Result:
        values = {"model": base.uri, "data": shards.uri, "output": str(tmp_path / name), **OPTIONS, **options}
        return step("finetune_full", **values)

    return run


def test_every_weight_moves_and_the_output_is_a_plain_model(tune, base, shards):
    result = tune()
    tuned = result.artifact
    model = AutoModelForCausalLM.from_pretrained(tuned.uri)
    before = AutoModelForCausalLM.from_pretrained(base.files.uri)
    names = dict(model.named_parameters())
    assert names and [name for name, old in before.named_parameters() if torch.equal(old, names[name])] == []
    losses = [json.loads(line) for line in tuned.read("training_log.jsonl").decode().splitlines()]
    assert losses[-1]["validation_loss"] < losses[2]["validation_loss"] < losses[0]["loss"]
    assert result.metrics["validation_loss"] == losses[-1]["validation_loss"]
    assert result.metrics["trainable_parameters"] == tuned.facts.parameters == sum(p.numel() for p in names.values())
    assert (tuned.facts.steps, tuned.facts.precision) == (6, "fp32")
    tokenizer = AutoTokenizer.from_pretrained(tuned.uri)
    assert tokenizer("def add").input_ids == AutoTokenizer.from_pretrained(base.files.uri)("def add").input_ids
    assert tuned.manifest.inputs == {"model": base.manifest.source(), "data": shards.manifest.source()}


def test_the_same_work_gives_the_same_bytes_and_another_seed_others(tune):
    first, second, other = tune(), tune("again"), tune("other", seed=4)
    assert first.artifact.manifest.sha256 == second.artifact.manifest.sha256
    weights = [load_file(one.artifact.fetch("model.safetensors")) for one in (first, other)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_shards_that_do_not_fit_the_model_are_refused(tune, save_model, shards, tmp_path):
    folder = save_model(tmp_path / "short", max_position_embeddings=16)
    short = step("import_model", source=str(folder), output=str(tmp_path / "short-artifact")).artifact
    with pytest.raises(ValueError, match="sequence length 32 is above the model's maximum of 16"):
        tune(model=short.uri)
    bare = step(
        "import_model",
        source=str(save_model(tmp_path / "bare", tokenizer=False)),
        output=str(tmp_path / "bare-artifact"),
    ).artifact
    with pytest.raises(ValueError, match="not that of"):
        tune(model=bare.uri)
    with pytest.raises(ValueError, match="a shards artifact is wanted"):
        tune(data=bare.uri)
    assert not (tmp_path / "tuned").exists()
