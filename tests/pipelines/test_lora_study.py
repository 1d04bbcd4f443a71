"""The committed lora_study, small, through KFP's own runner: both ways to tune, seed by seed, and what they took."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.pipelines.demo_corpus import gather

pytestmark = pytest.mark.slow

TRAINING = {"evaluate_every": 0, "warmup_steps": 1, "threads": 1, "evaluate_batches": 2}


def save_model(folder: Path, texts: list[str]) -> None:
    """A small random Llama with a tokenizer of its own."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)


def test_lora_and_full_fine_tuning_are_run_and_compared(crosstrain, tmp_path: Path) -> None:
    texts = [text[:800] for text in gather()[1][:120]]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    save_model(tmp_path / "base", texts)
    config = {
        "finetune_full": TRAINING,
        "finetune_lora": TRAINING,
        "shard": {"validation_fraction": 0.1},
        "compare_arms": {"instance_type": "my.box", "prices": str(tmp_path / "prices.yaml")},
    }
    (tmp_path / "prices.yaml").write_text("prices: {my.box: {usd_per_hour: 36, source: us, date: 2026-01-01}}")
    settings = {
        "model": tmp_path / "base", "corpus": tmp_path / "corpus.jsonl", "sequence_length": 32, "rank": 2,
        "seeds": "[1, 2]", "steps": 4, "config": json.dumps(config),
    }  # fmt: skip
    arguments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = crosstrain("run", "lora_study", "--out", tmp_path / "out", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps: dict[str, dict[str, Any]] = {step["title"]: step for step in summary["steps"]}
    comparison = Artifact.open(steps["Compare and judge"]["uri"], "comparison")
    assert (comparison.facts.control, comparison.facts.candidate) == ("finetune_full", "lora")
    assert comparison.facts.seeds == (1, 2)
    full, lora = (steps[f"Fine-tune {how}, seed 1"]["metrics"] for how in ("in full", "with LoRA"))
    report = Path(summary["reports"][0]).read_text()
    for count in (full["trainable_parameters"], lora["trainable_parameters"]):
        assert f">{count:,.0f}<" in report
    metrics = steps["Compare and judge"]["metrics"]
    assert metrics["control_cost_usd"] > 0 and metrics["candidate_cost_usd"] > 0 and "speed_up_percent" in metrics
    assert "up to -70%" in report and "Peak memory of the process" in report and "36 USD/h" in report
