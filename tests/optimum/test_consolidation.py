"""Our consolidation against optimum-neuron's own, on checkpoints cut by optimum-neuron's own transformations."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosstrain.components.core.neuron.checkpoint import find_checkpoint
from crosstrain.components.core.neuron.consolidation import consolidate
from crosstrain.components.core.storage import LocalStore

CASES = {
    "no parallelism": ({}, 1, {}),
    "tensor parallel": ({}, 2, {}),
    "fewer key-value heads than ranks": ({}, 4, {}),
    "keys copied four times": ({}, 8, {}),
    "fused query, key and value, copied": ({}, 4, {"fuse_qkv": True}),
    "fused query, key and value": ({"key_value_heads": 8}, 2, {"fuse_qkv": True}),
    "pipeline": ({"layers": 4}, 2, {"stages": 2}),
    "pipeline with copies": ({"layers": 4}, 4, {"stages": 2}),
}


def fuses(shape, ranks, fuse_qkv=False) -> bool:
    return bool(shape.key_value_heads % ranks) or (fuse_qkv and shape.heads == shape.key_value_heads)


@pytest.mark.parametrize("options, ranks, settings", CASES.values(), ids=CASES)
def test_it_gives_what_upstream_gives_and_what_was_cut(sharder, shape, tmp_path, options, ranks, settings):
    from optimum.neuron.models.training import consolidate_model_parallel_checkpoints_to_unified_checkpoint

    small = shape(**options)
    whole = sharder.adapter(small, fuses(small, ranks, settings.get("fuse_qkv", False)))
    folder = sharder.write(whole, small, ranks, **settings)
    consolidate_model_parallel_checkpoints_to_unified_checkpoint(folder, tmp_path / "upstream")
    theirs = load_file(tmp_path / "upstream" / "adapter_model.safetensors")
    ours = consolidate(find_checkpoint(LocalStore(folder.parent)))
    assert ours.keys() == theirs.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(ours[name], tensor), name
        assert torch.equal(theirs[name], tensor), name


def test_what_upstream_does_with_a_missing_rank_is_an_error_here(sharder, shape, tmp_path):
    from optimum.neuron.models.training import consolidate_model_parallel_checkpoints_to_unified_checkpoint

    small = shape()
    folder = sharder.write(sharder.adapter(small, False), small, 2)
    (folder / "adapter_default/adapter_shards/model/dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
    consolidate_model_parallel_checkpoints_to_unified_checkpoint(folder, tmp_path / "upstream")
    half = load_file(tmp_path / "upstream" / "adapter_model.safetensors")
    assert half["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (16, 2)
    with pytest.raises(FileNotFoundError, match="lacks 1 of 2 shards"):
        find_checkpoint(LocalStore(folder.parent))


def test_an_adapter_of_the_attention_alone_works_here_and_not_upstream(sharder, shape, tmp_path):
    from optimum.neuron.models.training import consolidate_model_parallel_checkpoints_to_unified_checkpoint

    small, targets = shape(), ("q_proj", "k_proj", "v_proj", "o_proj")
    whole = sharder.adapter(small, False, targets)
    folder = sharder.write(whole, small, 2, targets=targets)
    with pytest.raises(KeyError):
        consolidate_model_parallel_checkpoints_to_unified_checkpoint(folder, tmp_path / "upstream")
    ours = consolidate(find_checkpoint(LocalStore(folder)))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)


def test_upstream_takes_rank_0s_copy_of_ranks_that_disagree(sharder, shape, tmp_path):
    from optimum.neuron.models.training import consolidate_model_parallel_checkpoints_to_unified_checkpoint

    small = shape()
    folder = sharder.write(sharder.adapter(small, False), small, 2)
    path = folder / "adapter_default/adapter_shards/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(path, weights_only=True)
    state["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] *= 1.01
    torch.save(state, path)
    consolidate_model_parallel_checkpoints_to_unified_checkpoint(folder, tmp_path / "upstream")
    with pytest.raises(ValueError, match=r"down_proj.lora_B.weight: copies 0 and 1 .* sequence parallelism"):
        consolidate(find_checkpoint(LocalStore(folder)))


def test_the_committed_checkpoint_is_what_upstream_cuts(sharder, shape, tmp_path, request):
    """The one that the other environment's tests use."""
    committed = request.config.rootpath / "tests/data/neuron"
    small = shape()
    whole = sharder.adapter(small, True)
    folder = sharder.write(whole, small, 4)
    if request.config.getoption("--renew"):
        shutil.rmtree(committed, ignore_errors=True)
        shutil.copytree(folder, committed / "checkpoint-4")
    for path in (path for path in folder.rglob("*") if path.is_file()):
        other = committed / "checkpoint-4" / path.relative_to(folder)
        if path.suffix == ".pt":
            ours, theirs = torch.load(path, weights_only=True), torch.load(other, weights_only=True)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        else:
            assert path.read_text() == other.read_text(), other


def test_llama_1b_from_sixteen_ranks_has_the_shapes_that_merge_wants(sharder, shape, tmp_path):
    """The real model's numbers; on sixteen ranks its eight key-value heads are copied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from crosstrain.components.core.adapter_check import check_adapter, wanted_of
    from crosstrain.components.core.peft_adapter import read_adapter
    from crosstrain.components.core.weights import Tensor
    from crosstrain.components.merge.plan import Weighted, plan_merge

    real = shape(layers=16, hidden=2048, heads=32, key_value_heads=8, inside=8192, rank=1)
    folder = sharder.write(sharder.adapter(real, True), real, 16)
    whole = consolidate(find_checkpoint(LocalStore(folder)))
    config = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64,
                         tie_word_embeddings=True)  # fmt: skip
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).state_dict()
    tensors = {name: Tensor(name, "BF16", tuple(item.shape), "model.safetensors", 0) for name, item in weights.items()}
    del tensors["lm_head.weight"]  # tied
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(whole, adapter / "adapter_model.safetensors")
    shutil.copy(folder / "adapter_default/adapter_config.json", adapter)
    wanted = wanted_of(tensors, sorted({name.rpartition(".")[2] for name in real.modules()}))
    assert wanted.shapes == real.modules() and len(wanted.shapes) == 112
    check_adapter(adapter, wanted, "lora")
    plan = plan_merge(tensors, [Weighted(read_adapter(LocalStore(adapter)))], tied=True, untie=False, max_shard_bytes=0)
    assert sum(len(edit.changes) == 1 for edit in plan.edits) == 112
