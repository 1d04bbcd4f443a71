"""Data to tune on: JSONL corpora and shards made by the project's own steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Artifact]:
    """A corpus artifact of the given JSON rows."""

    def make(rows: list[dict[str, Any]], name: str = "rows") -> Artifact:
        folder = tmp_path / f"{name}.source"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = load_config("import_data").decode({"source": str(folder), "output": str(tmp_path / name)})
        return execute("import_data", config).artifact

    return make


@pytest.fixture
def shards(tmp_path: Path, corpus: Callable[..., Artifact]) -> Callable[..., Artifact]:
    """Shards of some English, made with a model's tokenizer by the project's own steps."""

    def make(model: Artifact, sequence_length: int = 32, name: str = "shards") -> Artifact:
        rows = [
            {"text": f"Mill {number} stands by the river, and {number * 7} sacks of flour lie in it."}
            for number in range(60)
        ]
        tokens = {
            "corpus": corpus(rows, f"{name}.text").uri, "tokenizer": model.uri,
            "output": str(tmp_path / f"{name}.tokens"),
        }  # fmt: skip
        made = execute("tokenize", load_config("tokenize").decode(tokens)).artifact
        values = {
            "tokens": made.uri, "output": str(tmp_path / name), "sequence_length": sequence_length,
            "validation_fraction": 0.2,
        }  # fmt: skip
        return execute("shard", load_config("shard").decode(values)).artifact

    return make


@pytest.fixture
def finetune(tmp_path: Path) -> Callable[..., Result]:
    """Run finetune_lora on a model and data, with few small steps unless told otherwise."""

    def run(model: Artifact, data: Artifact, name: str = "adapter", **options: Any) -> Result:
        values = {
            "model": model.uri, "data": data.uri, "output": str(tmp_path / name), "steps": 3, "global_batch_size": 4,
            "micro_batch_size": 2, "rank": 4, "alpha": 8, "warmup_steps": 1, "learning_rate": 1e-2, "threads": 1,
            **options,
        }  # fmt: skip
        return execute("finetune_lora", load_config("finetune_lora").decode(values))

    return run


@pytest.fixture
def pairs() -> list[dict[str, str]]:
    """Prompts and completions of different lengths."""
    return [
        {"prompt": f"Add {a} and {b}. ", "completion": f"The sum is {a + b}."} for a in range(4) for b in range(3, 6)
    ]
