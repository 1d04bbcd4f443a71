"""Merging an adapter, measured against peft's `merge_and_unload` and `save_pretrained` on the same checkpoint and disk.

    python -m bench.merge [--quick] [--work FOLDER]

Prints one JSON line a figure. The checkpoint (2.4 GB, `--quick`: 0.3 GB) is a random Llama in bfloat16 in shards of
500 MB with an FP32 adapter of rank 16 on all linear layers, made on the spot. Both arms hold the base in bfloat16,
write bfloat16 shards, and are fresh processes whose imports count. Every arm runs twice in turn with a warm page cache
(it holds what was just written); the better of the two is the figure. `crosstrain` is the merge alone, which is what
peft does; `crosstrain_step` is the whole step, with hashes of what it reads and writes and the proof, which peft has no
counterpart of. Left out: a cold page cache, which needs root to make.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import Cost, machine, measure, report, versions
from crosstrain.components.core.step import execute, load_config

PACKAGES = ("crosstrain", "torch", "transformers", "peft", "safetensors")
FULL = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 21, "num_attention_heads": 16}
QUICK = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}

MAKE = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
out, shape, dora = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "dora"
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = LlamaConfig(vocab_size=32000, num_key_value_heads=shape["num_attention_heads"], **shape)
model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.save_pretrained(out + "/base", max_shard_size="500MB")
tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear", use_dora=dora))
for name, parameter in tuned.named_parameters():
    if "lora_A" in name or "lora_B" in name:
        parameter.data.normal_(std=0.02)
tuned.save_pretrained(out + "/adapter")
print(json.dumps({"parameters": sum(p.numel() for n, p in model.named_parameters() if "lora" not in n)}))
"""

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="500MB")
"""

OURS = """
import sys
from pathlib import Path
from crosstrain.components.core.peft_adapter import read_adapter
from crosstrain.components.core.storage import LocalStore
from crosstrain.components.core.weights import model_tensors, write_file
from crosstrain.components.merge.arithmetic import merged_bytes
from crosstrain.components.merge.plan import Weighted, plan_merge
base, adapter, out = sys.argv[1:]
store = LocalStore(base)
tuned = Weighted(read_adapter(LocalStore(adapter)))
plan = plan_merge(model_tensors(store), [tuned], tied=False, untie=False, max_shard_bytes=0)
Path(out).mkdir()
for file, edits in plan.files.items():
    targets = [edit.target for edit in edits]
    write_file(Path(out) / file, targets, {"format": "pt"}, merged_bytes(edits, store))
"""

SAME = """
import json, sys
from pathlib import Path
import torch
from safetensors import safe_open
def tensors(folder):
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file, name
one = {name: file.get_tensor(key) for name, file, key in tensors(sys.argv[1])}
different = sum(int((one.pop(name) != file.get_tensor(key)).sum()) for name, file, key in tensors(sys.argv[2]))
print(json.dumps({"different_elements": different, "missing_tensors": len(one)}))
"""


def take(work: Path) -> dict[str, str]:
    """The checkpoint and its adapter as artifacts, for the whole step."""
    from crosstrain.components.core.artifact import ArtifactWriter
    from crosstrain.components.core.manifest import AdapterFacts

    values = {"source": str(work / "base"), "output": str(work / "model")}
    model = execute("import_model", load_config("import_model").decode(values)).artifact
    facts = AdapterFacts(
        method="lora", rank=16, alpha=8, target_modules=("q_proj",), trainable_parameters=1, base_parameters=1,
        base_sha256=model.manifest.sha256, steps=1, tokens_seen=1,
    )  # fmt: skip
    with ArtifactWriter(str(work / "tuned")) as out:
        out.add_folder(work / "adapter")
        adapter = out.commit("finetune_lora", facts, {}, {"model": model})
    return {"model": model.uri, "adapter": adapter.uri}


def arms(work: Path, round_: int, inputs: dict[str, str]) -> dict[str, list[str]]:
    """Arguments of Python for each arm."""
    places = [str(work / name) for name in ("base", "adapter")]
    out = {arm: str(work / f"{arm}-{round_}") for arm in ("peft", "crosstrain", "crosstrain_step")}
    step = json.dumps({**inputs, "output": out["crosstrain_step"]})
    return {
        "peft": ["-c", PEFT, *places, out["peft"]],
        "crosstrain": ["-c", OURS, *places, out["crosstrain"]],
        "crosstrain_step": ["-m", "crosstrain.components.merge", "--config", step],
    }


def run(work: Path, shape: dict[str, int], method: str) -> None:
    """Make the checkpoint, run every arm twice, and report."""
    made = measure(["-c", MAKE, str(work), json.dumps(shape), method]).output
    size = sum(path.stat().st_size for path in (work / "base").glob("*.safetensors"))
    report(what="checkpoint", method=method, bytes=size, **made)
    inputs = take(work)
    best: dict[str, Cost] = {}
    for round_ in range(2):
        for arm, arguments in arms(work, round_, inputs).items():
            cost = measure(arguments)
            report(what="merge", method=method, arm=arm, round=round_, **_figures(cost))
            if arm not in best or cost.seconds < best[arm].seconds:
                best[arm] = cost
    same: dict[str, Any] = measure(["-c", SAME, str(work / "peft-0"), str(work / "crosstrain-0")]).output
    for arm in ("crosstrain", "crosstrain_step"):
        report(
            what="merge_ratio", method=method, arm=arm,
            time=round(best[arm].seconds / best["peft"].seconds, 3),
            cpu=round(best[arm].cpu_seconds / best["peft"].cpu_seconds, 3),
            memory=round(best[arm].peak_worker_bytes / best["peft"].peak_worker_bytes, 3),
            **(same if arm == "crosstrain" else {}),
        )  # fmt: skip


def _figures(cost: Cost) -> dict[str, Any]:
    return {
        "seconds": round(cost.seconds, 2),
        "cpu_seconds": round(cost.cpu_seconds, 2),
        "peak_bytes": cost.peak_worker_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a checkpoint of 0.3 GB instead of 2.4 GB")
    parser.add_argument("--dora", action="store_true", help="a DoRA adapter instead of a LoRA one")
    parser.add_argument("--work", type=Path, help="folder for checkpoints and outputs, on the disk to be measured")
    arguments = parser.parse_args()
    report(what="machine", **machine(), versions=versions(PACKAGES))
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        run(Path(folder), QUICK if arguments.quick else FULL, "dora" if arguments.dora else "lora")


if __name__ == "__main__":
    main()
