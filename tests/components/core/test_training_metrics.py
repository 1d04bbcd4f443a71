"""What a run leaves in its state beside checkpoints: every step once, whatever happened; no MFU off a device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core import training_metrics
from crosstrain.components.core.parallel.world import ALONE, World
from crosstrain.components.core.precision import choose
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_metrics import Metrics

CPU = torch.device("cpu")


@pytest.fixture
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    )


def metrics(folder: Path, model: Any, device: torch.device = CPU, world: World = ALONE, **options: Any) -> Metrics:
    chosen = TrainingOptions(global_batch_size=8, **options)
    return Metrics(str(folder), model, chosen, choose("fp32", CPU), device, world)


def row(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 4.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 64 * step}


def lines(folder: Path) -> dict[str, list[int]]:
    return {
        path.name: [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in sorted((folder / "metrics").iterdir())
    }


def test_a_segment_is_an_object_and_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path, model):
    with metrics(tmp_path, model) as first:
        for step in (1, 2, 3):
            first.add(row(step), 64, 0.5)
        first.flush()
        first.add(row(4), 64, 0.5)
    assert lines(tmp_path) == {"00000001-00000003.jsonl": [1, 2, 3], "00000004-00000004.jsonl": [4]}
    again = metrics(tmp_path, model)
    again.forget(3)
    for step in (4, 5):
        again.add(row(step), 64, 0.5)
    again.forget(4)
    again.flush()
    assert lines(tmp_path) == {"00000001-00000003.jsonl": [1, 2, 3], "00000004-00000004.jsonl": [4]}
    last = json.loads((tmp_path / "metrics" / "00000004-00000004.jsonl").read_text())
    assert {**row(4), "tokens_per_second": 128.0}.items() <= last.items()
    assert last["peak_rss_bytes"] > 1e6 and last["time"] > 1e9 and "mfu" not in last


def test_mfu_is_over_all_devices_and_absent_in_emulation(tmp_path, model, monkeypatch):
    monkeypatch.setattr(training_metrics, "device_peak", lambda device, stated: 1e9)
    alone, four = metrics(tmp_path, model), metrics(tmp_path, model, world=World(size=4))
    flops = training_metrics.Flops.of(model).per_token(16)
    assert alone.add(row(1), 8 * 16, 0.5)["mfu"] == pytest.approx(256 * flops / 1e9)
    assert four.add(row(1), 8 * 16, 0.5)["mfu"] == pytest.approx(64 * flops / 1e9)
    emulated = Metrics(str(tmp_path), model, TrainingOptions(), choose("fp8", CPU), CPU, World())
    assert list(emulated.add(row(1), 64, 0.5)) == ["emulation_tokens_per_second"]


def test_only_the_first_rank_writes_and_deletes(tmp_path, model):
    with metrics(tmp_path, model) as first:
        first.add(row(1), 64, 0.5)
    other = metrics(tmp_path, model, world=World(rank=1, size=2))
    other.forget(0)
    other.add(row(9), 64, 0.5)
    other.flush()
    assert lines(tmp_path) == {"00000001-00000001.jsonl": [1]}


def test_tensorboard_reads_one_curve_over_all_segments(tmp_path, model):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = metrics(tmp_path, model, tensorboard=True)
    for step in range(1, 7):
        written.add(row(step), 64, 0.5)
        if step % 2 == 0:
            written.flush()
    written.forget(4)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(item.step, item.value) for item in events.Scalars("loss")] == [
        (step, pytest.approx(4.0 / step)) for step in range(1, 5)
    ]
    assert not {"step", "time"} & set(events.Tags()["scalars"])


def test_tensorboard_without_its_package_is_refused(tmp_path, model, monkeypatch):
    monkeypatch.setattr(training_metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        metrics(tmp_path, model, tensorboard=True)
