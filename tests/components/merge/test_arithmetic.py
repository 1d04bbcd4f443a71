"""The merged weights have the bits of peft's own merge, whatever the adapter, the type, and where rows are cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import Embedding
from safetensors import safe_open
from safetensors.torch import load_file

from crosstrain.components.core import weights

PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
    "alpha_pattern": {"q_proj": 7, "model.layers.0.mlp.down_proj": 1},
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 5},
    "dora": {"use_dora": True},
    "patterns": PATTERNS,
    "rslora-patterns": {"use_rslora": True, **PATTERNS},
    "lm_head": {"target_modules": ["lm_head", "v_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "saved-head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "saved-both": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


def stored(folder: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def peft_merge(tuned: Any) -> dict[str, torch.Tensor]:
    """Peft's merge, with an embedding's update added in FP32, where peft rounds it before."""
    embedding = tuned.get_base_model().get_input_embeddings()
    weight = None
    if isinstance(embedding, Embedding):
        base = embedding.get_base_layer().weight
        weight = (base.float() + embedding.get_delta_weight("default")).to(base.dtype)
    merged: dict[str, torch.Tensor] = tuned.merge_and_unload(safe_merge=False).state_dict()
    return merged if weight is None else merged | {"model.embed_tokens.weight": weight}


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_has_the_bits_of_pefts_merge(
    save_model, import_model, save_adapter, merge, in_memory, tmp_path, dtype, options
) -> None:
    model = import_model(save_model(tmp_path / "base", dtype=dtype))
    adapter = save_adapter(model, **options)
    result = merge(model, adapter)
    expected = peft_merge(in_memory(model, adapter))
    assert_same(expected, stored(result.artifact.uri))
    assert result.artifact.facts.dtype == dtype
    assert result.artifact.facts.precision == "merged"
    changed = sum(not torch.equal(tensor, expected[name]) for name, tensor in stored(str(tmp_path / "base")).items())
    assert result.metrics["merged_tensors"] == changed > 0


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "lm_head"]}])
def test_where_rows_are_cut_changes_no_bit(
    save_model, import_model, save_adapter, merge, in_memory, tmp_path, monkeypatch, options
) -> None:
    model = import_model(save_model(tmp_path / "base", dtype="bfloat16", intermediate_size=333, vocab_size=515))
    adapter = save_adapter(model, **options)
    monkeypatch.setattr(weights, "BLOCK_BYTES", 4096)
    tensor = weights.Tensor("w", "BF16", (333, 64), "f", 0)
    assert list(weights.row_blocks(tensor, 64 * 4)) == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 333)]
    result = merge(model, adapter)
    assert_same(peft_merge(in_memory(model, adapter)), stored(result.artifact.uri))


def test_half_precision_adapters_are_merged_in_fp32(
    save_model, import_model, save_adapter, merge, in_memory, tmp_path
) -> None:
    model = import_model(save_model(tmp_path / "base", dtype="bfloat16"))
    adapter = save_adapter(model, change=lambda tuned: tuned.to(torch.bfloat16))
    with safe_open(adapter.fetch("adapter_model.safetensors"), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    result = merge(model, adapter)
    assert_same(peft_merge(in_memory(model, adapter)), stored(result.artifact.uri))


def test_untouched_tensors_headers_shards_and_index_stay(
    save_model, import_model, save_adapter, merge, tmp_path
) -> None:
    folder = save_model(tmp_path / "base", dtype="bfloat16", shard="60KB")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    model = import_model(folder)
    merged = Path(merge(model, save_adapter(model, target_modules=["q_proj"])).artifact.uri)
    assert sorted(path.name for path in merged.glob("*.safetensors")) == files
    index = "model.safetensors.index.json"
    before, after = (json.loads((place / index).read_text()) for place in (folder, merged))
    assert before["weight_map"] == after["weight_map"]
    assert before["metadata"]["total_size"] == after["metadata"]["total_size"]
    for file in files:
        old, new = load_file(folder / file), load_file(merged / file)
        assert all(torch.equal(old[name], new[name]) != ("q_proj" in name) for name in old)
        with safe_open(merged / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def test_shards_are_cut_to_the_given_size(save_model, import_model, save_adapter, merge, in_memory, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = import_model(save_model(tmp_path / "base"))
    adapter = save_adapter(model)
    merged = Path(merge(model, adapter, max_shard_bytes=100_000).artifact.uri)
    files = sorted(path.name for path in merged.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(merged / name).values()) <= 100_000 for name in files)
    loaded = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert_same(peft_merge(in_memory(model, adapter)), loaded)


def test_the_same_merge_gives_the_same_bytes(save_model, import_model, save_adapter, merge, tmp_path) -> None:
    model = import_model(save_model(tmp_path / "base", dtype="bfloat16"))
    adapter = save_adapter(model, use_dora=True)
    first, second = merge(model, adapter, "one"), merge(model, adapter, "two")
    assert first.artifact.manifest.sha256 == second.artifact.manifest.sha256
    assert str(tmp_path) not in first.artifact.manifest.encode().decode()
