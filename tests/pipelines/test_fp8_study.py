"""The committed fp8_study, small, through KFP's own runner: pairs, verdict, report, and a second run that resumes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.pipelines import spec
from crosstrain.pipelines.demo_corpus import gather

pytestmark = pytest.mark.slow

CONFIG = {
    "train_fp8": {"evaluate_every": 0, "warmup_steps": 2, "threads": 1, "evaluate_batches": 2},
    "shard": {"validation_fraction": 0.1},
}


def test_every_seed_is_run_in_both_arms_and_judged(crosstrain, tmp_path: Path) -> None:
    english, _ = gather()
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text[:1000]}) + "\n" for text in english[:150]))
    settings = {
        "corpus": tmp_path / "corpus.jsonl",
        "vocab_size": 300,
        "sequence_length": 32,
        "preset": "debug",
        "control": "fp32",
        "seeds": "[3, 5]",
        "steps": 4,
        "config": json.dumps(CONFIG),
    }
    arguments = ["run", "fp8_study", "--out", tmp_path / "out"]
    arguments += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = crosstrain(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["pipeline_sha256"] == hashlib.sha256((spec.COMPILED / "fp8_study.yaml").read_bytes()).hexdigest()
    steps: dict[str, dict[str, Any]] = {step["title"]: step for step in summary["steps"]}
    runs = {title: Artifact.open(step["uri"]) for title, step in steps.items() if title.startswith("Train")}
    assert {title: (run.facts.precision, run.manifest.options["seed"]) for title, run in runs.items()} == {
        "Train the control, seed 3": ("fp32", 3),
        "Train the control, seed 5": ("fp32", 5),
        "Train in FP8, seed 3": ("fp8-torchao-emulated", 3),
        "Train in FP8, seed 5": ("fp8-torchao-emulated", 5),
    }
    comparison = Artifact.open(steps["Compare and judge"]["uri"], "comparison")
    assert comparison.facts.seeds == (3, 5) and comparison.facts.control == "fp32"
    for row in json.loads(comparison.read("comparison.json"))["seeds"]:
        for arm, title in (("control_loss", "Train the control"), ("candidate_loss", "Train in FP8")):
            log = runs[f"{title}, seed {row['seed']}"].read("training_log.jsonl").decode().splitlines()
            assert row[arm] == round(json.loads(log[-1])["validation_loss"], 6)
    (report,) = summary["reports"]
    assert "FP8 was emulated" in Path(report).read_text() and f"report: {report}" in done.stdout
    again = crosstrain(*arguments)
    assert again.returncode == 0, again.stderr
    after = json.loads((tmp_path / "out" / "summary.json").read_text())
    reused = {step["title"] for step in after["steps"] if step["status"] == "reused"}
    assert reused == set(steps) - {"Import corpus", "Preflight"}
