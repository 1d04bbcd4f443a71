"""Memory: a few blocks at a time, whatever the model's size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MEASURE = """
import json, sys
from pathlib import Path
import torch
from crosstrain.components.core.peft_adapter import read_adapter
from crosstrain.components.core.storage import LocalStore
from crosstrain.components.core.weights import model_tensors, write_file
from crosstrain.components.merge.arithmetic import merged_bytes
from crosstrain.components.merge.plan import Weighted, plan_merge

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

base, adapter, out = sys.argv[1:]
store = LocalStore(base)
held = read_adapter(LocalStore(adapter))
plan = plan_merge(model_tensors(store), [Weighted(held)], tied=False, untie=False, max_shard_bytes=0)
torch.ones(64, 64) @ torch.ones(64, 64)
before = peak()
for file, edits in plan.files.items():
    write_file(Path(out), [edit.target for edit in edits], {}, merged_bytes(edits, store))
print(json.dumps(peak() - before))
"""


@pytest.mark.parametrize("dora", [False, True])
def test_peak_memory_is_a_few_blocks(tmp_path: Path, dora: bool) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(12)]
    save_file({f"{name}.weight": torch.randn(4096, 1024).bfloat16() for name in names}, base / "model.safetensors")
    factors = {}
    for name in names:
        factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(8, 1024)
        factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(4096, 8)
        if dora:
            factors[f"base_model.model.{name}.lora_magnitude_vector"] = torch.ones(4096)
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": dora}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-c", MEASURE, str(base), str(adapter), str(tmp_path / "out.safetensors")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert (tmp_path / "out.safetensors").stat().st_size > 100e6
    assert grown < 70 << 20
