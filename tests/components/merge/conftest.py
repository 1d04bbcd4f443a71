"""Running merge, and peft's own merge to compare it with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import Result, execute, load_config


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., Result]:
    """Run merge on two artifacts."""

    def run(model: Artifact, adapter: Artifact, output: str = "merged", **options: Any) -> Result:
        place = output if "://" in output else str(tmp_path / output)
        values = {"model": model.uri, "adapter": adapter.uri, "output": place, **options}
        return execute("merge", load_config("merge").decode(values))

    return run


@pytest.fixture
def in_memory() -> Callable[..., Any]:
    """The base with its adapter as peft holds them, unmerged."""

    def load(model: Artifact, adapter: Artifact, **options: Any) -> Any:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model.fetch_all(), dtype="auto", **options)
        return PeftModel.from_pretrained(base, adapter.fetch_all())

    return load
