"""Models: shapes, and artifacts that are plain Hugging Face folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from crosstrain.components.core import model as models
from crosstrain.components.core.artifact import ArtifactWriter
from crosstrain.components.core.manifest import TokenizerFacts
from crosstrain.components.core.presets import PRESETS, read_shape

CPU = torch.device("cpu")


def tokenizer(vocab_size: int = 128_256, bos_id: int | None = 5, eos_id: int = 6) -> TokenizerFacts:
    return TokenizerFacts(sha256="0" * 64, vocab_size=vocab_size, bos_id=bos_id, eos_id=eos_id)


PARAMETERS = {"1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248}
"""Parameters of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B as published, tied ones once."""


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_parameters_of_the_models_they_are_named_for(preset):
    config = models.llama_config(PRESETS[preset], tokenizer())
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert models.count_parameters(model) == PARAMETERS[preset]
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["rope_theta"] == 500_000.0
    assert config.max_position_embeddings == 131_072


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_trained_in_fp8(preset):
    from crosstrain.components.core.precision import choose

    choose("fp8", CPU).check(models.llama_config(PRESETS[preset], tokenizer(4001)))


def test_tiny_has_about_two_million_parameters():
    model = models.build_model(models.llama_config(PRESETS["tiny"], tokenizer(4096)), 0, CPU)
    assert 1_000_000 < models.count_parameters(model) < 3_000_000


def test_a_model_is_a_function_of_its_seed():
    config = models.llama_config(PRESETS["debug"], tokenizer(96))
    one, same, other = (models.build_model(config, seed, CPU).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_users_configuration_by_text_and_by_uri(tmp_path, store_uri):
    from crosstrain.components.core.storage import open_store

    fields = {
        **PRESETS["debug"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
    open_store(store_uri).write("a/config.json", json.dumps(fields).encode())
    by_text, by_uri = read_shape("tiny", json.dumps(fields)), read_shape("tiny", f"{store_uri}/a/config.json")
    assert by_text == by_uri
    config = models.llama_config(by_text, tokenizer(96, bos_id=None))
    assert (config.num_hidden_layers, config.vocab_size, config.bos_token_id, config.eos_token_id) == (1, 96, None, 6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", "not JSON"),
        ('{"model_type": "gpt2"}', "this is gpt2"),
        ('{"hidden_size": 64, "num_attention_heads": 5}', "does not fit"),
        ('{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3}', "not a multiple"),
    ],
)
def test_a_configuration_that_does_not_do_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        models.llama_config(read_shape("tiny", text), tokenizer(96))


def test_a_configuration_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_shape("tiny", str(tmp_path / "config.json"))


def test_sequences_longer_than_the_model_are_refused():
    config = models.llama_config(PRESETS["debug"], tokenizer(96))
    models.check_length(512, config)
    with pytest.raises(ValueError, match=r"513.*512 positions"):
        models.check_length(513, config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_loads_with_equal_logits(tmp_path, tied, dtype):
    shape = {**PRESETS["debug"], "tie_word_embeddings": tied}
    config = models.llama_config(shape, tokenizer(96))
    model = models.build_model(config, 0, CPU).eval()
    ids = torch.arange(20)[None]
    with ArtifactWriter(str(tmp_path / "model")) as writer:
        models.add_model(writer, model, dtype)
        facts = models.llama_facts(
            config, parameters=1, dtype=str(dtype).removeprefix("torch."), tokenizer_sha256=None, precision="fp32"
        )
        artifact = writer.commit("train_fp8", facts, {}, {})
    for item in model.parameters():
        item.data = item.data.to(dtype)
    wanted = model(input_ids=ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model")(input_ids=ids).logits, wanted)
    loaded = models.load_model(artifact, dtype)
    assert loaded.dtype == dtype and torch.equal(loaded(input_ids=ids).logits, wanted)
    assert json.loads(artifact.read("config.json"))["tie_word_embeddings"] is tied


def test_a_model_in_several_files_loads_with_equal_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SHARD_SIZE", 20_000)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = models.build_model(config, 0, CPU).eval()
    with ArtifactWriter(str(tmp_path / "model")) as writer:
        models.add_model(writer, model, torch.float32)
        folder = Path(shutil.copytree(tmp_path / "model", tmp_path / "plain"))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    ids = torch.arange(24)[None]
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
