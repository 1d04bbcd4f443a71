"""The committed pipelines, whole and small, through the command: what ran is what is committed, and it worked."""

import hashlib
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstrain.components.core.artifact import Artifact
from crosstrain.pipelines import spec
from crosstrain.pipelines.demo_corpus import gather

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ROOT / "pipelines" / "compiled"

pytestmark = pytest.mark.slow

CONFIG = {
    "train_fp8": {"learning_rate": 3e-3, "warmup_steps": 5, "evaluate_every": 0, "micro_batch_size": 8},
    "finetune_lora": {"learning_rate": 5e-3, "warmup_steps": 2, "evaluate_every": 0},
    "evaluate": {"max_samples": 40},
}
SETTINGS = {
    "vocab_size": 512,
    "sequence_length": 64,
    "preset": "debug",
    "train_steps": 60,
    "tune_steps": 25,
    "config": json.dumps(CONFIG),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    paths = {}
    for name, documents in zip(("english", "python"), gather(), strict=True):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps({"text": text[:2000]}) + "\n" for text in documents[:300]))
    return paths


@pytest.fixture(scope="module")
def run(command: list[str], corpora: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """pretrain_finetune, run once; its folder, what it printed and its summary."""
    folder = tmp_path_factory.mktemp("chain")
    settings = {**SETTINGS, "corpus": corpora["english"], "tuning_corpus": corpora["python"]}
    return call(command, folder, "pretrain_finetune", settings)


def call(command: list[str], folder: Path, pipeline: str, settings: dict[str, Any]) -> dict[str, Any]:
    arguments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [*command, "run", pipeline, *arguments, "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return {"stdout": done.stdout, "summary": summary, "steps": {step["component"]: step for step in summary["steps"]}}


def artifact(run: dict[str, Any], component: str) -> Artifact:
    return Artifact.open(run["steps"][component]["uri"])


def test_what_ran_is_the_committed_yaml(run):
    committed = hashlib.sha256((COMPILED / "pretrain_finetune.yaml").read_bytes()).hexdigest()
    assert run["summary"]["pipeline_sha256"] == committed
    assert run["summary"]["status"] == "succeeded"


def test_the_model_learned_and_tuning_helped(run):
    metrics = run["steps"]["evaluate"]["metrics"]
    assert metrics["forgetting_baseline_loss"] < metrics["forgetting_unigram_entropy"], "the base model learned nothing"
    assert metrics["candidate_loss"] < metrics["baseline_loss"]
    assert metrics["passed"] == 1


def test_emulated_fp8_is_called_so_and_claims_no_speed(run):
    assert artifact(run, "train_fp8").facts.precision == "fp8-torchao-emulated"
    assert not [name for name in run["steps"]["train_fp8"]["metrics"] if name == "tokens_per_second"]
    report = Path(run["summary"]["reports"][0]).read_text()
    assert "fp8-torchao-emulated" in report


def test_what_the_ui_shows_of_the_run_is_small_and_self_contained(run):
    """HTML of every step that has one: under 1 MB, nothing fetched; summaries with links to what exists."""
    folder = Path(run["summary"]["reports"][0]).parent
    shown = {"system.HTML": 0, "system.Markdown": 0, "system.Metrics": 0}
    for task in spec.load("pretrain_finetune").tasks(run["summary"]["parameters"]):
        for name, kind in task.outputs.items():
            if kind not in shown:
                continue
            shown[kind] += 1
            if kind == "system.Metrics":
                (metrics,) = [step["metrics"] for step in run["summary"]["steps"] if step["task"] == task.name]
                assert metrics and all(map(math.isfinite, metrics.values()))
                continue
            text = next((folder / "artifacts").glob(f"*/{task.name}/{name}")).read_text()
            if kind == "system.HTML":
                assert len(text.encode()) < 1_000_000
                assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\((?!#)|\bsrc=|href=(?!\"#)", text)
            else:
                links = re.findall(r"\]\(([^)]+)\)", text)
                assert links and [link for link in links if not Path(link).exists()] == []
    assert all(shown.values())


def test_lineage_leads_from_the_verdict_to_the_text(run):
    evaluation, merged = artifact(run, "evaluate").manifest, artifact(run, "merge").manifest
    base, adapter = artifact(run, "train_fp8").manifest, artifact(run, "finetune_lora").manifest
    assert evaluation.inputs["candidate"].sha256 == merged.sha256
    assert merged.inputs["model"].sha256 == base.sha256 == evaluation.inputs["baseline"].sha256
    assert merged.inputs["adapter"].sha256 == adapter.sha256
    assert adapter.facts.base_sha256 == base.sha256


def test_the_merged_model_is_a_plain_hugging_face_folder(run):
    folder = artifact(run, "merge").uri
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4


def test_the_run_ends_with_a_table_and_the_report(run):
    assert run["summary"]["reports"][0] in run["stdout"]
    for title in ("Import corpus", "Pre-train", "Merge and prove", "Evaluate"):
        assert title in run["stdout"]


def test_finetune_takes_an_existing_model(run, command, corpora, tmp_path):
    settings = {
        "model": artifact(run, "train_fp8").uri,
        "corpus": corpora["python"],
        "sequence_length": 64,
        "method": "dora",
        "rank": 4,
        "steps": 15,
        "config": json.dumps({name: CONFIG[name] for name in ("finetune_lora", "evaluate")}),
    }
    tuned = call(command, tmp_path, "finetune", settings)
    assert tuned["steps"]["evaluate"]["metrics"]["passed"] == 1
    assert artifact(tuned, "finetune_lora").facts.method == "dora"
    assert artifact(tuned, "import_model").facts.precision == "imported"
