"""A checkpoint that optimum-neuron's own code cut becomes an adapter that peft loads and merge takes; else an error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config

SHAPE = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
"""Of the committed checkpoint: on four ranks the two key-value heads are copied twice."""
SHARD = "adapter_default/adapter_shards/model/dp_rank_00_tp_rank_02_pp_rank_00.pt"


@pytest.fixture
def model(save_model, import_model, tmp_path) -> Artifact:
    return import_model(save_model(tmp_path / "base", **SHAPE))


@pytest.fixture
def run_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a training would leave: one whole checkpoint, of step 4."""
    folder = tmp_path / "run"
    shutil.copytree(request.config.rootpath / "tests/data/neuron", folder)
    return folder


@pytest.fixture
def consolidate(model: Artifact, run_folder: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(source: str = "", output: str = "adapter", **options: str) -> Result:
        values = {"model": model.uri, "source": source or str(run_folder), "output": str(tmp_path / output), **options}
        return execute("consolidate", load_config("consolidate").decode(values))

    return run


def alter(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def test_peft_loads_it_and_merge_takes_it(model, consolidate, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = consolidate(base_name="org/base")
    facts = result.artifact.facts
    assert (facts.method, facts.rank, facts.alpha, facts.steps) == ("lora", 2, 4, 4)
    assert facts.base_sha256 == model.manifest.sha256 and len(facts.target_modules) == 7
    assert (result.metrics["tensor_parallel"], result.metrics["pipeline_parallel"]) == (4, 1)
    weights = load_file(result.artifact.fetch("adapter_model.safetensors"))
    assert facts.trainable_parameters == sum(tensor.numel() for tensor in weights.values())
    settings = json.loads(result.artifact.read("adapter_config.json"))
    assert settings["base_model_name_or_path"] == "org/base" and settings["inference_mode"]
    base = AutoModelForCausalLM.from_pretrained(model.fetch_all())
    tuned = PeftModel.from_pretrained(base, result.artifact.fetch_all())
    held = {name.replace(".default", ""): item for name, item in tuned.named_parameters() if "lora_" in name}
    assert held.keys() == weights.keys() and all(torch.equal(held[name], weights[name]) for name in held)
    values = {"model": model.uri, "adapter": result.artifact.uri, "output": str(tmp_path / "merged")}
    merged = execute("merge", load_config("merge").decode(values))
    assert merged.metrics["merged_tensors"] == 14


def test_the_same_checkpoint_gives_the_same_bytes_from_a_folder_or_its_checkpoint(consolidate, run_folder):
    first, second = consolidate(output="one"), consolidate(str(run_folder / "checkpoint-4"), output="two")
    assert first.artifact.manifest.files == second.artifact.manifest.files


def test_another_checkpoint_at_the_source_is_not_taken_for_the_old_one(consolidate, run_folder):
    consolidate()
    shutil.copytree(run_folder / "checkpoint-4", run_folder / "checkpoint-11")
    assert consolidate().artifact.facts.steps == 11


@pytest.mark.parametrize("missing", [
    "adapter_default/adapter_config.json", "adapter_default/adapter_shards/done", SHARD,
    "adapter_default/adapter_shards/mp_metadata_pp_rank_0.json",
])  # fmt: skip
def test_a_torn_checkpoint_is_passed_over_for_the_last_whole_one(consolidate, run_folder, missing, caplog):
    shutil.copytree(run_folder / "checkpoint-4", run_folder / "checkpoint-9")
    shutil.copytree(run_folder / "checkpoint-4", run_folder / "checkpoint--1")
    (run_folder / "checkpoint-9" / missing).unlink()
    assert consolidate().artifact.facts.steps == 4
    assert "checkpoint-9" in caplog.text and "passed over" in caplog.text


def test_the_last_one_is_by_number_not_by_name(consolidate, run_folder):
    for step in (9, 100, 20):
        shutil.copytree(run_folder / "checkpoint-4", run_folder / f"checkpoint-{step}")
    assert consolidate().artifact.facts.steps == 100


def test_no_whole_checkpoint_is_an_error_that_says_what_each_lacks(consolidate, run_folder, tmp_path):
    (run_folder / "checkpoint-4" / SHARD).unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-4 lacks 1 of 4 shards \(first: .*tp_rank_02"):
        consolidate()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint-<step> folder"):
        consolidate(str(tmp_path / "empty"))
    assert not (tmp_path / "adapter" / "manifest.json").exists()


def test_shards_of_torch_xla_are_told(consolidate, run_folder):
    folder = run_folder / "checkpoint-4" / (SHARD + ".tensors")
    folder.mkdir()
    (folder / "tensor_0.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="use_xser=True"):
        consolidate()


@pytest.mark.parametrize("layer, wanted", [
    ("mlp.down_proj.lora_B.weight", "copies 0 and 2"),
    ("self_attn.o_proj.lora_B.weight", "copies 0 and 2"),
    ("mlp.gate_up_proj.lora_A.weight", "copies 0 and 2"),
    ("self_attn.qkv_proj.lora_B.weight_v", "copies 0 and 1"),
])  # fmt: skip
def test_ranks_that_disagree_on_what_all_hold_are_an_error(consolidate, run_folder, layer, wanted):
    """What sequence parallelism does: gradients that are not added up over the ranks."""
    name = f"base_model.model.model.layers.1.{layer}"
    alter(run_folder / "checkpoint-4" / SHARD, lambda state: state[name].add_(0.01))
    with pytest.raises(ValueError, match=rf"{layer}.*{wanted} of what every rank must hold alike.*sequence paral"):
        consolidate()


def test_a_difference_of_one_rounding_is_none(consolidate, run_folder):
    """Trainium rounds stochastically, on each core by itself."""
    for path in (run_folder / "checkpoint-4" / SHARD).parent.iterdir():
        alter(path, lambda state: state.update({name: tensor.bfloat16() for name, tensor in state.items()}))
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"

    def round_up(state: dict[str, torch.Tensor]) -> None:
        state[name].view(torch.int16)[::2] += 1

    alter(run_folder / "checkpoint-4" / SHARD, round_up)
    weights = load_file(consolidate().artifact.fetch("adapter_model.safetensors"))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_a_lost_parameter_a_damaged_file_and_dora_are_errors(consolidate, run_folder):
    lost = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    shards = sorted((run_folder / "checkpoint-4" / SHARD).parent.iterdir())
    whole = [path.read_bytes() for path in shards]
    alter(shards[2], lambda state: state.pop(lost))
    with pytest.raises(ValueError, match="holds other parameters than rank 0's"):
        consolidate()
    for path in shards[:2] + shards[3:]:
        alter(path, lambda state: state.pop(lost))
    with pytest.raises(ValueError, match=r"the shards lack .*down_proj.lora_A"):
        consolidate()
    for path, data in zip(shards, whole, strict=True):
        path.write_bytes(data)
    shards[1].write_bytes(whole[1][: len(whole[1]) // 2])
    with pytest.raises(ValueError, match="not a readable shard"):
        consolidate()
    shards[1].write_bytes(whole[1])
    config = run_folder / "checkpoint-4/adapter_default/adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(ValueError, match="plain LoRA under DoRA's name"):
        consolidate()


def test_magnitudes_in_the_shards_are_refused(consolidate, run_folder):
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector"
    for path in (run_folder / "checkpoint-4" / SHARD).parent.iterdir():
        alter(path, lambda state: state.update({name: torch.ones(8)}))
    with pytest.raises(ValueError, match="magnitudes are norms of one rank's part"):
        consolidate()


def test_an_adapter_that_learned_nothing_or_is_of_another_model_is_an_error(
    consolidate, run_folder, save_model, import_model, tmp_path
):
    def zero(state: dict[str, torch.Tensor]) -> None:
        state["base_model.model.model.layers.1.mlp.gate_up_proj.lora_B.weight"].zero_()

    other = import_model(save_model(tmp_path / "other", **{**SHAPE, "intermediate_size": 64}))
    with pytest.raises(
        ValueError, match=r"down_proj: the adapter fits \(32, 128\), and the base's weight is \(32, 64\)"
    ):
        consolidate(model=other.uri)
    deeper = import_model(save_model(tmp_path / "deeper", **SHAPE, num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"layers.2.* is missing from the adapter \(14 modules, 21 wanted\)"):
        consolidate(model=deeper.uri)
    for path in (run_folder / "checkpoint-4" / SHARD).parent.iterdir():
        alter(path, zero)
    with pytest.raises(ValueError, match="B is all zero, so nothing was learned"):
        consolidate()


def test_it_works_from_object_storage(consolidate, run_folder, s3_uri):
    from crosstrain.components.core.storage import open_store

    store = open_store(s3_uri)
    for path in (path for path in run_folder.rglob("*") if path.is_file()):
        store.upload(path, path.relative_to(run_folder).as_posix())
    assert consolidate(s3_uri).artifact.facts.steps == 4
