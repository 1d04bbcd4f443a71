"""merge against peft itself: the same bits, the same logits, and a refusal of everything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config

PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
    "alpha_pattern": {"q_proj": 7, "model.layers.0.mlp.down_proj": 1},
}


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., Result]:
    def run(model: Artifact, adapter: Artifact, name: str = "merged", **options: Any) -> Result:
        values = {"model": model.uri, "adapter": adapter.uri, "output": str(tmp_path / name), **options}
        return execute("merge", load_config("merge").decode(values))

    return run


def peft_merge(model: Artifact, adapter: Artifact) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(model.fetch_all(), dtype="auto")
    return PeftModel.from_pretrained(base, adapter.fetch_all()).merge_and_unload(safe_merge=False).state_dict()


def stored(folder: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "r": 5}, {"use_dora": True}, PATTERNS],
    ids=["lora", "rslora", "dora", "patterns"],
)
def test_has_pefts_bits(save_model, import_model, save_adapter, merge, tmp_path, dtype, options) -> None:
    model = import_model(save_model(tmp_path / "base", dtype=dtype))
    adapter = save_adapter(model, **options)
    result = merge(model, adapter)
    expected, found = peft_merge(model, adapter), stored(result.artifact.uri)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert 0 < result.metrics["max_abs_logit_difference"] < 1.5 * result.metrics["rounding_logit_difference"]
    print(result.metrics)
