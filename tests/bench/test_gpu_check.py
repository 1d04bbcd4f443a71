"""The GPU check, as far as a CPU goes: what it says without a GPU, and each of its checks over emulated recipes."""

import argparse
import json

import pytest
import torch
from transformers import LlamaConfig

from bench import gpu_check
from crosstrain.components.core.precision import choose

CPU = torch.device("cpu")
OPTIONS = argparse.Namespace(preset="debug", steps=8, length=64, batch=2, arms="bf16,tensorwise,delayed,block")
CONFIG = LlamaConfig(
    vocab_size=gpu_check.VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=64,
    num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_fails(capsys):
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "no CUDA device" in json.loads(line)["error"]


def test_every_line_of_a_run_and_a_refused_arm(capsys):
    failed = list(gpu_check.run(CPU, OPTIONS, lambda: 1.0))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert failed == []
    assert [line["check"] for line in lines[:2]] == ["device", "recipe"]
    assert lines[1]["arm"] == "block" and "hidden_size is 64" in lines[1]["refused"]
    assert [(line["arm"], line["check"]) for line in lines[2:]] == [
        (arm, check) for arm in ("bf16", "tensorwise", "delayed") for check in ("layers", "training", "checkpoint")
    ]
    assert not [key for line in lines for key in line if key in ("tokens_per_second", "mfu")], "no speed off a GPU"
    assert abs(lines[-2]["loss_gap_percent"]) < 5
    assert lines[-1]["state_tensors"] == 14 * 4


def test_what_does_not_fit_in_the_time_is_left_out_and_said(capsys):
    assert list(gpu_check.run(CPU, argparse.Namespace(**{**vars(OPTIONS), "arms": "bf16"}), lambda: 0.0)) == []
    assert capsys.readouterr().out.count("no time left") == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "block", "mxfp8"])
def test_layer_errors_are_those_of_fp8_and_a_wrong_product_fails(recipe, monkeypatch):
    line = gpu_check.check_layers(choose("fp8", CPU, recipe=recipe), CONFIG, CPU, tokens=128)
    worst = [max(values) for values in line["relative_error"].values()]
    assert line["passed"] and line["fp8_layers"] == len(worst) == 7
    assert all(0.005 < value < gpu_check.LAYER_LIMIT for value in worst)
    monkeypatch.setattr(gpu_check, "LAYER_LIMIT", 0.01)
    assert not gpu_check.check_layers(choose("fp8", CPU, recipe=recipe), CONFIG, CPU, tokens=128)["passed"]


def test_an_arm_far_from_bf16_fails():
    assert not gpu_check.compare({"bf16": 3.0, "current": 3.3}, "current")["passed"]
    assert gpu_check.compare({"bf16": 3.0, "current": 3.03}, "current") == {"loss_gap_percent": 1.0, "passed": True}
