"""A standard adapter that has learned, the same bytes for the same work, and refusals before training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.finetune_lora import adapter as adapters


@pytest.fixture
def model(save_model, import_model, tmp_path) -> Artifact:
    return import_model(save_model(tmp_path / "base"))


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"method": "dora"}, {"rslora": True, "dropout": 0.1}], ids=["lora", "dora", "rslora"]
)
def test_peft_loads_the_adapter_and_it_has_learned(model, corpus, finetune, pairs, options, base_dtype) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = finetune(model, corpus(pairs), steps=30, learning_rate=2e-2, base_dtype=base_dtype, **options)
    history = [json.loads(line) for line in result.artifact.read("training_log.jsonl").splitlines()]
    assert [row["step"] for row in history] == list(range(1, 31))
    assert history[-1]["loss"] < history[0]["loss"] - 1
    assert result.metrics["train_loss"] == result.artifact.facts.train_loss == history[-1]["loss"]
    base = AutoModelForCausalLM.from_pretrained(model.fetch_all())
    before = sum(parameter.numel() for parameter in base.parameters())
    tuned = PeftModel.from_pretrained(base, result.artifact.fetch_all())
    trainable = sum(p.numel() for name, p in tuned.named_parameters() if "lora_" in name)
    assert result.metrics["trainable_parameters"] == trainable
    assert result.metrics["trainable_fraction"] == trainable / (before + trainable)
    assert all(p.dtype == torch.float32 for p in load_file(result.artifact.fetch("adapter_model.safetensors")).values())
    assert any("magnitude" in name for name, _ in tuned.named_parameters()) == (options.get("method") == "dora")
    facts = result.artifact.facts
    assert (facts.rows, facts.rows_dropped, facts.base_sha256) == (len(pairs), 0, model.manifest.sha256)
    assert result.metrics["tokens_seen"] == facts.tokens_seen == history[-1]["tokens"] > 0


def test_the_same_work_gives_the_same_bytes_and_tells_no_place(model, corpus, finetune, pairs, tmp_path) -> None:
    data = corpus(pairs)
    first = finetune(model, data, "one", dropout=0.1)
    second = finetune(model, data, "two", dropout=0.1)
    assert first.artifact.manifest.sha256 == second.artifact.manifest.sha256
    assert (
        finetune(model, data, "three", dropout=0.1, seed=1).artifact.manifest.sha256 != first.artifact.manifest.sha256
    )
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "training_log.jsonl", "manifest.json", "run.json",
    }  # fmt: skip
    settings = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == f"crosstrain-model-{model.manifest.sha256[:12]}"
    assert settings["target_modules"] == sorted(settings["target_modules"])
    for path in (tmp_path / "one").iterdir():
        assert path.name == "run.json" or str(tmp_path).encode() not in path.read_bytes(), path.name
    named = finetune(model, data, "named", base_name="org/model").artifact
    assert json.loads(named.read("adapter_config.json"))["base_model_name_or_path"] == "org/model"


def test_a_resumed_run_ends_with_the_same_bytes(model, corpus, finetune, pairs, tmp_path) -> None:
    data = corpus(pairs)
    options = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9, "dropout": 0.2, "method": "dora"}
    whole = finetune(model, data, "whole", **options).artifact
    state = tmp_path / "whole.state"
    (run,) = state.iterdir()
    saved = sorted(path.name for path in run.iterdir())
    assert saved == ["metrics", "step-00000002", "step-00000004", "step-00000006"]
    for late in ("step-00000004", "step-00000006"):
        shutil.rmtree(run / late)
    resumed = finetune(model, data, "resumed", state=str(state), **options)
    assert resumed.artifact.manifest.sha256 == whole.manifest.sha256


def test_shards_come_with_the_bound_on_local_disk_which_is_no_part_of_the_work(model, shards, finetune, s3_uri) -> None:
    made, store = Path(shards(model).uri), open_store(s3_uri)
    for path in made.rglob("*"):
        if path.is_file():
            store.upload(path, path.relative_to(made).as_posix())
    data = Artifact.open(s3_uri)
    values = {"model": model.uri, "data": data.uri, "output": "out"}
    config = load_config("finetune_lora").decode({**values, "cache_bytes": 10})
    assert config.options() == load_config("finetune_lora").decode(values).options()
    with pytest.raises(ValueError, match="a cache of 10 bytes does not hold its largest shard"):
        finetune(model, data, cache_bytes=10)


def test_shards_are_trained_on_and_their_validation_split_measured(model, shards, finetune) -> None:
    result = finetune(model, shards(model), steps=20, evaluate_every=5)
    log = [json.loads(line) for line in result.artifact.read("training_log.jsonl").splitlines()]
    losses = [row["validation_loss"] for row in log if "validation_loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert result.metrics["validation_loss"] == losses[-1]
    assert result.metrics["rows"] == 0


def test_chosen_modules_alone_are_tuned(model, corpus, finetune, pairs) -> None:
    result = finetune(model, corpus(pairs), target_modules=("v_proj", "layers.1.mlp.up_proj"))
    names = {name.rsplit(".lora_", 1)[0] for name in load_file(result.artifact.fetch("adapter_model.safetensors"))}
    prefix = "base_model.model.model."
    assert names == {
        prefix + name for name in ("layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.up_proj")
    }
    assert result.artifact.facts.target_modules == ("up_proj", "v_proj")


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_tuned_adapter_merges_and_is_proven(
    save_model, import_model, corpus, finetune, pairs, tmp_path, method
) -> None:
    base = import_model(save_model(tmp_path / "half", dtype="bfloat16", tie_word_embeddings=True))
    tuned = finetune(base, corpus(pairs), method=method, steps=5).artifact
    values = {"model": base.uri, "adapter": tuned.uri, "output": str(tmp_path / "merged")}
    result = execute("merge", load_config("merge").decode(values))
    assert result.artifact.facts.dtype == "bfloat16"
    assert result.artifact.facts.tied_embeddings
    assert result.metrics["max_abs_logit_difference"] <= 2 * result.metrics["rounding_logit_difference"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank: .*greater than or equal to 1"),
        ({"sequence_length": 257}, r"sequence_length 257 is above the model's maximum of 256"),
        ({"target_modules": ("q_porj",)}, r"no linear module is called 'q_porj'. did you mean q_proj"),
        ({"target_modules": ("all-linear", "q_proj")}, r"no linear module is called 'all-linear'.*all-linear alone"),
        ({"dropout": 1.0}, r"dropout: .*less than 1"),
        ({"method": "loha"}, r"method: "),
        ({"device": "cuda"}, r"sees no CUDA device"),
        ({"prompt_field": "question"}, r"line 1: has neither the text fields 'question' and 'completion'"),
        ({"no_such": 1}, r"no_such: unknown option"),
    ],
)
def test_wrong_options_are_refused_before_training(model, corpus, finetune, pairs, tmp_path, options, message) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=message):
        finetune(model, corpus(pairs), **options)
    assert not list(tmp_path.glob("adapter.state/*/*"))


def test_lm_head_of_a_tied_model_is_no_target(save_model, import_model, corpus, finetune, pairs, tmp_path) -> None:
    tied = import_model(save_model(tmp_path / "tied", tie_word_embeddings=True))
    with pytest.raises(ValueError, match="lm_head is tied to the embedding"):
        finetune(tied, corpus(pairs), target_modules=("lm_head",))


def test_data_of_another_tokenizer_or_too_long_are_refused(
    save_model, import_model, shards, corpus, finetune, pairs, model, tmp_path
) -> None:
    short = import_model(save_model(tmp_path / "short", max_position_embeddings=16))
    bare = import_model(save_model(tmp_path / "bare", tokenizer=False))
    small = import_model(save_model(tmp_path / "small", vocab_size=100))
    other = import_model(save_model(tmp_path / "other"))
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "other", changed)
    text = (changed / "tokenizer.json").read_text()
    (changed / "tokenizer.json").write_text(text + "\n")
    foreign = import_model(changed)
    data = shards(other)
    with pytest.raises(ValueError, match=r"sequence length 32 is above the model's maximum of 16"):
        finetune(short, data)
    with pytest.raises(ValueError, match=r"made with the tokenizer .*, and the model has .*; tokenize the text again"):
        finetune(foreign, data)
    with pytest.raises(ValueError, match=r"and the model has no tokenizer.json"):
        finetune(bare, data)
    with pytest.raises(ValueError, match=r"the model has no tokenizer.json, and rows of text need one"):
        finetune(bare, corpus(pairs, "a"))
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ ids and the model's embedding 100"):
        finetune(small, corpus(pairs, "b"))
    with pytest.raises(ValueError, match=r"a model artifact; give shards or a corpus"):
        finetune(model, other)


def test_a_place_without_permission_is_refused_before_training(model, corpus, finetune, pairs, tmp_path) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    with pytest.raises(PermissionError, match="cannot write the output here"):
        finetune(model, corpus(pairs), "blocked/adapter")


@pytest.fixture
def written(model, corpus, finetune, pairs, tmp_path) -> tuple[Path, adapters.Expected]:
    """A DoRA adapter as written, and what it must hold."""
    artifact = finetune(model, corpus(pairs), method="dora").artifact
    tensors = load_file(artifact.fetch("adapter_model.safetensors"))
    names = [
        key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in tensors if ".lora_A" in key
    ]
    shapes = {
        name: (
            tensors[f"base_model.model.{name}.lora_B.weight"].shape[0],
            tensors[f"base_model.model.{name}.lora_A.weight"].shape[1],
        )
        for name in names
    }
    before = {name: torch.zeros(shape[0]) for name, shape in shapes.items()}
    folder = tmp_path / "copy"
    shutil.copytree(artifact.fetch_all(), folder)
    adapters.check_adapter(folder, adapters.Expected(shapes, before), "dora")
    return folder, adapters.Expected(shapes, before)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("zero_b", "B is all zero, so nothing was learned"),
        ("lost_module", "is missing from the adapter"),
        ("lost_magnitude", "lacks lora_magnitude_vector"),
        ("still_magnitude", "magnitudes have not moved"),
        ("plain_lora", "says use_dora=False, and dora was asked for"),
        ("nan", "not finite"),
        ("wrong_shape", "fits .* and the base's weight is"),
    ],
)
def test_the_written_adapter_is_checked(written, harm, message) -> None:
    folder, wanted = written
    tensors = load_file(folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    name = "model.layers.0.self_attn.q_proj"
    key = f"base_model.model.{name}"
    if harm == "zero_b":
        tensors[f"{key}.lora_B.weight"].zero_()
    elif harm == "nan":
        tensors[f"{key}.lora_A.weight"][0, 0] = float("nan")
    elif harm == "lost_module":
        tensors = {other: tensor for other, tensor in tensors.items() if not other.startswith(key)}
    elif harm == "lost_magnitude":
        del tensors[f"{key}.lora_magnitude_vector"]
    elif harm == "still_magnitude":
        wanted.magnitudes[name] = tensors[f"{key}.lora_magnitude_vector"].clone()
    elif harm == "wrong_shape":
        wanted.shapes[name] = (1, 1)
    else:
        settings["use_dora"] = False
        tensors = {other: tensor for other, tensor in tensors.items() if "magnitude" not in other}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        adapters.check_adapter(folder, wanted, "dora")


def test_a_missing_weight_is_no_random_number(save_model, import_model, corpus, finetune, pairs, tmp_path) -> None:
    folder = save_model(tmp_path / "torn")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights lack model.layers.0.mlp.up_proj.weight"):
        finetune(import_model(folder), corpus(pairs))
