"""What becomes of the rest of a model: tied and resized embeddings, rope scaling, side files, every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.import_model.program import ARCHITECTURES

ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "GraniteForCausalLM": "granite", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
    "Olmo2ForCausalLM": "olmo2", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}  # fmt: skip
IDS = torch.arange(60).reshape(2, 30) * 7 % 384


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.float().eval()(IDS).logits


def test_an_adapter_on_tied_embeddings_is_refused(save_model, import_model, save_adapter, merge, tmp_path) -> None:
    model = import_model(save_model(tmp_path / "base", tie_word_embeddings=True))
    for number, options in enumerate(
        ({"target_modules": ["lm_head"]}, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]})
    ):
        with pytest.raises(ValueError, match=r"ties its two embeddings.*tied_embeddings=untie"):
            merge(model, save_adapter(model, f"adapter-{number}", **options), f"out-{number}")


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora-head", "lora-embedding", "saved-embedding", "saved-head"],
)
def test_untied_embeddings_compute_what_peft_computes(
    save_model, import_model, save_adapter, merge, in_memory, tmp_path, options
) -> None:
    model = import_model(save_model(tmp_path / "base", tie_word_embeddings=True))
    adapter = save_adapter(model, **options)
    result = merge(model, adapter, tied_embeddings="untie")
    merged = AutoModelForCausalLM.from_pretrained(result.artifact.uri)
    assert not result.artifact.facts.tied_embeddings
    assert result.artifact.facts.parameters == sum(p.numel() for p in merged.parameters())
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)
    torch.testing.assert_close(logits(merged), logits(in_memory(model, adapter)), rtol=0, atol=1e-4)


def test_new_tokens_on_tied_embeddings_survive(
    save_model, import_model, save_adapter, merge, tmp_path, tokenizer_folder
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = import_model(save_model(tmp_path / "base", tie_word_embeddings=True))
    base = AutoModelForCausalLM.from_pretrained(model.fetch_all())
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens([f"<new-{number}>" for number in range(16)])
    torch.manual_seed(3)
    base.resize_token_embeddings(400)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    torch.nn.init.normal_(
        tuned.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"), std=0.1
    )
    folder = tmp_path / "peft"
    tuned.save_pretrained(folder, save_embedding_layers=True)
    tokenizer.save_pretrained(folder)
    template = save_adapter(model)
    with ArtifactWriter(str(tmp_path / "resized")) as out:
        out.add_folder(folder)
        adapter = out.commit("finetune_lora", template.facts, {}, {})
    result = merge(model, adapter)
    merged = AutoModelForCausalLM.from_pretrained(result.artifact.uri)
    assert result.artifact.facts.vocab_size == merged.config.vocab_size == 400
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    again = AutoModelForCausalLM.from_pretrained(model.fetch_all())
    again.resize_token_embeddings(400)
    torch.testing.assert_close(logits(merged), logits(PeftModel.from_pretrained(again, folder)), rtol=0, atol=1e-4)
    assert AutoTokenizer.from_pretrained(result.artifact.uri).convert_tokens_to_ids("<new-3>") == len(tokenizer) - 13
    assert result.artifact.facts.tokenizer_sha256 == adapter.manifest.file("tokenizer.json").sha256


def test_rope_scaling_and_side_files_are_kept_byte_for_byte(
    save_model, import_model, save_adapter, merge, tmp_path
) -> None:
    folder = save_model(tmp_path / "base", rope_parameters=ROPE, dtype="bfloat16")
    (folder / "training_log.jsonl").write_text("{}\n")
    (folder / "README.md").write_text("hello")
    model = import_model(folder)
    merged = Path(merge(model, save_adapter(model)).artifact.uri)
    kept = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for name in kept:
        assert (merged / name).read_bytes() == (folder / name).read_bytes(), name
    assert {path.name for path in merged.iterdir()} == {*kept, "model.safetensors", "manifest.json", "run.json"}
    assert AutoModelForCausalLM.from_pretrained(merged).config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_supported_architecture(
    save_model, import_model, save_adapter, merge, in_memory, tmp_path, architecture
) -> None:
    model = import_model(save_model(tmp_path / "base", kind=KINDS[architecture], dtype="bfloat16"))
    assert model.facts.architecture == architecture
    adapter = save_adapter(model)
    result = merge(model, adapter)
    merged = AutoModelForCausalLM.from_pretrained(result.artifact.uri, dtype="auto").state_dict()
    for name, tensor in in_memory(model, adapter).merge_and_unload().state_dict().items():
        assert torch.equal(tensor, merged[name]), name
    assert 0.2 < result.metrics["max_abs_logit_difference"] / result.metrics["rounding_logit_difference"] < 1.6


def test_everything_may_lie_in_object_storage(save_model, import_model, save_adapter, merge, s3_uri, tmp_path) -> None:
    from crosstrain.components.core.step import execute, load_config
    from crosstrain.components.core.storage import open_store

    folder = save_model(tmp_path / "base", dtype="bfloat16", shard="60KB")
    here = import_model(folder)
    local = merge(here, save_adapter(here))
    store = open_store(f"{s3_uri}/source")
    for path in folder.iterdir():
        store.upload(path, path.name)
    options = {"source": f"{s3_uri}/source", "output": f"{s3_uri}/model"}
    model = execute("import_model", load_config("import_model").decode(options)).artifact
    adapter = Artifact.open(str(tmp_path / "adapter"))
    remote = merge(model, adapter, f"{s3_uri}/merged", check_base=False)
    assert remote.artifact.manifest.files == local.artifact.manifest.files
    assert remote.metrics["max_abs_logit_difference"] == local.metrics["max_abs_logit_difference"]


def test_json_of_an_untied_model_changes_in_one_option(save_model, import_model, save_adapter, merge, tmp_path) -> None:
    folder = save_model(tmp_path / "base", tie_word_embeddings=True)
    model = import_model(folder)
    result = merge(model, save_adapter(model, target_modules=["lm_head"]), tied_embeddings="untie")
    before, after = (json.loads(Path(place, "config.json").read_text()) for place in (folder, result.artifact.uri))
    assert after == before | {"tie_word_embeddings": False}
