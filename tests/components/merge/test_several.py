"""Several adapters with weights are what peft's own combination of them is; what has no sum is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.merge import arithmetic

IDS = torch.arange(60).reshape(2, 30) * 7 % 350


@pytest.fixture
def three(save_model, import_model, save_adapter, tmp_path) -> tuple[Artifact, list[Artifact]]:
    """A bf16 base, and adapters of different ranks, scales and modules."""
    model = import_model(save_model(tmp_path / "base", dtype="bfloat16"))

    def scaled(factor: float):
        def change(tuned: Any) -> None:
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.data.mul_(factor)

        return change

    return model, [
        save_adapter(model, "one", scaled(1.0)),
        save_adapter(model, "two", scaled(-0.7), r=6, use_rslora=True, target_modules=["q_proj", "down_proj"]),
        save_adapter(model, "three", scaled(1.3), r=2, lora_alpha=3, target_modules=["q_proj", "lm_head"]),
    ]


def by_peft(model: Artifact, adapters: list[Artifact], weights: list[float]) -> dict[str, torch.Tensor]:
    """Peft's combination merged in FP32, then rounded; on a bf16 base peft rounds the combined factors themselves."""
    base = AutoModelForCausalLM.from_pretrained(model.fetch_all(), dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, adapters[0].fetch_all(), "a0")
    names = ["a0"]
    for number, adapter in enumerate(adapters[1:], 1):
        names.append(f"a{number}")
        tuned.load_adapter(adapter.fetch_all(), names[-1])
    tuned.add_weighted_adapter(names, weights, "all", combination_type="cat")
    tuned.set_adapter("all")
    merged = tuned.merge_and_unload(safe_merge=False).state_dict()
    return {name: tensor.bfloat16() for name, tensor in merged.items()}


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, -1.25, 2.0]])
def test_has_the_bits_of_pefts_concatenation(three, merge, weights) -> None:
    model, adapters = three
    more = [one.uri for one in adapters[1:]]
    result = merge(model, adapters[0], more_adapters=more, weights=weights)
    found = load_file(Path(result.artifact.uri) / "model.safetensors")
    expected = by_peft(model, adapters, weights)
    assert expected.keys() == found.keys()
    different = {name: int((expected[name] != found[name]).sum()) for name in found}
    assert not {name: count for name, count in different.items() if count}
    assert result.metrics["merged_tensors"] == 15
    assert {*result.artifact.manifest.inputs} == {"model", "adapter", "more_adapters_0", "more_adapters_1"}
    assert "more_adapters" not in result.artifact.manifest.options
    assert result.artifact.manifest.options["weights"] == weights


def test_one_adapter_with_a_weight(three, merge) -> None:
    model, adapters = three
    found = load_file(Path(merge(model, adapters[0], weights=[0.25]).artifact.uri) / "model.safetensors")
    expected = by_peft(model, adapters[:1], [0.25])
    assert all(torch.equal(expected[name], found[name]) for name in found)


def test_the_proof_sees_a_forgotten_weight(three, merge, monkeypatch, tmp_path) -> None:
    model, adapters = three
    read = arithmetic._read_factors
    monkeypatch.setattr(arithmetic, "_read_factors", lambda changes: read([replace(c, weight=1.0) for c in changes]))
    with pytest.raises(ValueError, match="no manifest was written: logits differ by"):
        merge(model, adapters[0], more_adapters=[adapters[1].uri], weights=[1.0, -1.0])
    assert not (tmp_path / "merged" / "manifest.json").exists()


def test_what_has_no_sum_is_refused(three, save_adapter, merge) -> None:
    model, adapters = three
    dora = save_adapter(model, "dora", use_dora=True)
    head = save_adapter(model, "head", target_modules=["v_proj"], modules_to_save=["lm_head"])
    for options, message in (
        ({"more_adapters": [dora.uri]}, "a DoRA adapter rescales whole rows, so it is merged alone and with weight 1"),
        ({"more_adapters": [head.uri], "weights": [1.0, 0.5]}, "replaces lm_head.weight whole, which takes no weight"),
        ({"more_adapters": [head.uri, adapters[2].uri]}, "replaces lm_head.weight, which .*three changes"),
        ({"more_adapters": [head.uri], "weights": [1.0]}, "weights: 1 for 2 adapters; give one each, or none"),
        ({"weights": [float("nan")]}, "weights"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(model, adapters[0], **options)
    with pytest.raises(ValueError, match="merged alone and with weight 1"):
        merge(model, dora, weights=[0.5])
    alone = merge(model, adapters[1], "whole", more_adapters=[head.uri], weights=[0.5, 1.0])
    assert alone.metrics["merged_tensors"] == 2 + 2 + 2 + 1  # q_proj, down_proj; v_proj; lm_head


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["copied", "merged"])
def test_a_padded_vocabulary_is_trimmed(save_model, import_model, save_adapter, merge, tmp_path, tied, targets) -> None:
    if tied and "lm_head" in targets:
        pytest.skip("lm_head is no target of its own there")
    folder = save_model(tmp_path / "base", tie_word_embeddings=tied, dtype="bfloat16")  # 384 rows, 350 ids
    model = import_model(folder)
    adapter = save_adapter(model, target_modules=targets)
    whole, trimmed = merge(model, adapter, "whole"), merge(model, adapter, "trimmed", trim_vocabulary=True)
    assert (whole.artifact.facts.vocab_size, trimmed.artifact.facts.vocab_size) == (384, 350)
    loaded = [AutoModelForCausalLM.from_pretrained(one.artifact.uri).float().eval() for one in (whole, trimmed)]
    assert loaded[1].config.vocab_size == 350
    assert trimmed.artifact.facts.parameters == sum(parameter.numel() for parameter in loaded[1].parameters())
    with torch.inference_mode():
        padded, cut = (one(IDS).logits for one in loaded)
    assert torch.equal(padded[..., :350], cut)
    before, after = (json.loads(Path(at, "config.json").read_text()) for at in (folder, trimmed.artifact.uri))
    assert after == before | {"vocab_size": 350}


def test_nothing_to_trim_to_is_refused(save_model, import_model, save_adapter, merge, tmp_path) -> None:
    bare = import_model(save_model(tmp_path / "bare", tokenizer=False))
    with pytest.raises(ValueError, match=r"no tokenizer.json, so there is nothing to trim the vocabulary to"):
        merge(bare, save_adapter(bare), trim_vocabulary=True)
