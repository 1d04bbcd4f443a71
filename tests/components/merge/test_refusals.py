"""What merge refuses, and that its proof can fail: no manifest is written then."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.merge import arithmetic, program, proof, streamed


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Artifact]:
    """An adapter artifact with its configuration or tensors changed."""

    def alter(adapter: Artifact, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Artifact:
        folder = tmp_path / "altered.peft"
        shutil.copytree(adapter.fetch_all(), folder, ignore=shutil.ignore_patterns("manifest.json"))
        settings = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        change(settings, tensors)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "adapter_model.safetensors")
        with ArtifactWriter(str(tmp_path / "altered")) as out:
            out.add_folder(folder)
            return out.commit("finetune_lora", adapter.facts, {}, {})

    return alter


KEY = "base_model.model.model.layers.0.self_attn.q_proj"


def _drop(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{KEY}.lora_B.weight"]


def _rename(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for part in ("A", "B"):
        tensors[f"{KEY.replace('q_proj', 'x_proj')}.lora_{part}.weight"] = tensors.pop(f"{KEY}.lora_{part}.weight")


def _foreign(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{KEY}.lora_C.weight"] = torch.zeros(1)


def _widen(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{KEY}.lora_B.weight"] = torch.ones(65, 4)


def _break(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{KEY}.lora_B.weight"][3] = float("nan")


def _option(**options: Any) -> Callable[..., None]:
    return lambda settings, tensors: settings.update(options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"q_proj lacks lora_B"),
        (_rename, r"changes model.layers.0.self_attn.x_proj.weight, and the base has no such tensor"),
        (_foreign, r"lora_C.weight is of no kind that is handled"),
        (_widen, r"made for model.layers.0.self_attn.q_proj.weight of \(65, 64\), and the base's is \(64, 64\)"),
        (_break, r"q_proj.weight: merged rows 0 to 64 hold values that are not finite"),
        (_option(use_dora=True), r"lacks lora_magnitude_vector"),
        (_option(r=3), r"rank 3 is set for .* and its tensors are \(4, "),
        (_option(init_lora_weights="pissa_niter_4"), r"initialised by pissa_niter_4, which changed the base weights"),
        (_option(init_lora_weights="olora"), r"initialised by olora"),
        (_option(peft_type="LOHA"), r"a LOHA adapter"),
        (_option(bias="all"), r"bias='all'"),
        (_option(use_some_new_variant=True), r"use_some_new_variant is set \(True\), which is not handled"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refuses_what_it_would_merge_wrongly(
    save_model, import_model, save_adapter, altered, merge, tmp_path, change, message
) -> None:
    model = import_model(save_model(tmp_path / "base", tokenizer=False))
    adapter = altered(save_adapter(model), change)
    with pytest.raises(ValueError, match=message):
        merge(model, adapter)
    assert not (tmp_path / "merged" / "manifest.json").exists()


def test_refuses_an_adapter_of_another_base_unless_told(
    save_model, import_model, save_adapter, merge, tmp_path
) -> None:
    model = import_model(save_model(tmp_path / "base"))
    other = import_model(save_model(tmp_path / "other", rms_norm_eps=1e-5))
    adapter = save_adapter(model)
    with pytest.raises(ValueError, match=r"trained on the model .* check_base=false"):
        merge(other, adapter)
    assert merge(other, adapter, check_base=False).metrics["merged_tensors"] == 14


def _forget_scale(weight: torch.Tensor, factors: Any, start: int, stop: int) -> torch.Tensor:
    return weight.add_(factors.b[start:stop] @ factors.a)


def _forget_one_row(weight: torch.Tensor, factors: Any, start: int, stop: int) -> torch.Tensor:
    weight[1:].add_(factors.b[start + 1 : stop] @ factors.a * factors.scale)
    return weight


@pytest.mark.parametrize("wrong", [_forget_scale, _forget_one_row])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_proof_finds_wrong_arithmetic(
    save_model, import_model, save_adapter, merge, tmp_path, monkeypatch, wrong, dtype
) -> None:
    model = import_model(save_model(tmp_path / "base", dtype=dtype))
    adapter = save_adapter(model)
    monkeypatch.setattr(arithmetic, "merge_rows", wrong)
    with pytest.raises(ValueError, match="no manifest was written: logits differ by"):
        merge(model, adapter)
    assert not (tmp_path / "merged" / "manifest.json").exists()


@pytest.mark.parametrize("victim", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_the_proof_reads_the_files_as_written(
    save_model, import_model, save_adapter, merge, tmp_path, monkeypatch, victim
) -> None:
    model = import_model(save_model(tmp_path / "base", dtype="bfloat16"))
    adapter = save_adapter(model)
    write = program.write_file

    def damage(path: Path, *rest: Any) -> None:
        write(path, *rest)
        tensors = load_file(path)
        tensors[victim].view(-1)[:8] *= -3
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(program, "write_file", damage)
    with pytest.raises(ValueError, match="no manifest was written: logits differ by"):
        merge(model, adapter)


def test_the_proof_finds_a_lost_rope_scaling(
    save_model, import_model, save_adapter, merge, tmp_path, monkeypatch
) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    options = {"rope_parameters": rope, "max_position_embeddings": 65536, "dtype": "bfloat16"}
    model = import_model(save_model(tmp_path / "base", **options))
    adapter = save_adapter(model)
    keep = program._write_side_files

    def lose(*rest: Any) -> dict[str, Any]:
        return keep(*rest) | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}

    monkeypatch.setattr(program, "_write_side_files", lose)
    with pytest.raises(ValueError, match="no manifest was written: logits differ by"):
        merge(model, adapter)


def test_a_difference_that_is_no_number_fails_the_proof() -> None:
    with pytest.raises(ValueError, match="logits differ by nan"):
        proof.Proof(float("nan"), 1.0, 2.0, 0.0, 1.0).check()


def test_a_library_too_old_for_the_position_encoding_says_so(
    save_model, import_model, save_adapter, merge, tmp_path, monkeypatch
) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    path = save_model(tmp_path / "base", rope_parameters=rope) / "config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "rope_theta"}
    path.write_text(json.dumps({**settings, "rope_parameters": rope}))  # as transformers 5 writes it
    model = import_model(path.parent)
    adapter = save_adapter(model)
    monkeypatch.setattr(streamed, "version", lambda name: "4.57.1")
    with pytest.raises(ValueError, match=r"rope_parameters .*llama3.* transformers 4.57.1 does not read"):
        merge(model, adapter)
    assert not (tmp_path / "merged" / "manifest.json").exists()
