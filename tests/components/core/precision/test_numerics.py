"""What a watch tells: counts worked out by hand, exact for every backend, and without touching the training."""

import math

import pytest
import torch
from torch import nn

from crosstrain.components.core.precision import choose
from crosstrain.components.core.precision.numerics import TensorNumerics, Watch, merge, summary
from crosstrain.components.core.precision.recipes import RECIPES

CPU = torch.device("cpu")
IDS = torch.arange(64)[None] % 64


def watch_one(recipe: str, x: torch.Tensor, gradient: torch.Tensor, scales: dict[str, float] | None = None) -> Watch:
    linear = nn.Linear(x.shape[1], gradient.shape[1], bias=False)
    nn.init.constant_(linear.weight, 0.5)
    given = (lambda name, role: torch.full((1, 1), scales[role])) if scales else (lambda name, role: None)
    watch = Watch(RECIPES[recipe], given)
    with watch.hooked({"one": linear}):
        linear(x.requires_grad_()).backward(gradient)
    linear(x).sum().backward()
    return watch


def test_amax_underflow_and_saturation_worked_out_by_hand():
    """Scale 448 / 448 = 1: E4M3 keeps 2^-9 and loses 2^-11. Gradients have scale 1 as well: E5M2 loses 2^-18."""
    x = torch.tensor([[448.0, 2.0**-9, 2.0**-11, 0.0]])
    found = watch_one("current", x, torch.tensor([[57344.0, 2.0**-18]])).layers()["one"]
    assert (found["input"].amax, found["input"].underflow, found["input"].saturation) == (448.0, 1 / 3, 0.0)
    assert (found["weight"].amax, found["weight"].underflow) == (0.5, 0.0)
    assert (found["gradient"].amax, found["gradient"].underflow) == (57344.0, 0.5)


def test_a_stale_scale_saturates():
    x = torch.tensor([[1.0, 464.0, 465.0, -1e6]])
    found = watch_one("delayed", x, torch.ones(1, 2), {"input": 1.0, "weight": 1.0, "gradient": 1e6}).layers()["one"]
    assert found["input"].saturation == 0.5, "464 rounds to 448 and counts as kept"
    assert found["gradient"].saturation == 1.0


def test_underflow_of_a_block_is_its_own():
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 128] = 448.0, 2.0**-11, 2.0**-11
    found = watch_one("block", x, torch.ones(1, 2)).layers()["one"]
    assert found["input"].underflow == 1 / 3
    assert watch_one("current", x, torch.ones(1, 2)).layers()["one"]["input"].underflow == 2 / 3


def test_what_is_not_finite_shows_in_amax_and_stays_out_of_the_summary():
    x = torch.tensor([[math.inf, 1.0]])
    watch = watch_one("current", x, torch.tensor([[math.nan, 1.0]]))
    found = watch.layers()["one"]
    assert found["input"].amax == math.inf and found["input"].saturation == 0.5
    assert math.isnan(found["gradient"].amax)
    worst = summary(watch.layers())
    assert "fp8_input_amax" not in worst and worst["fp8_input_saturation"] == 0.5
    assert worst["fp8_weight_amax"] == 0.5


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "block", "mxfp8"])
def test_a_watch_sees_every_layer_and_changes_nothing(llama, recipe):
    gradients, watches = [], []
    for watched in (False, True):
        model, precision = llama(), choose("fp8", CPU, recipe=recipe)
        precision.convert(model)
        for index in range(2):
            if watched and index:
                with precision.watch(model) as watch:
                    for _ in range(2):
                        with precision.autocast():
                            loss = model(input_ids=IDS, labels=IDS).loss
                        loss.backward()
                watches.append(watch)
            else:
                for _ in range(2):
                    with precision.autocast():
                        loss = model(input_ids=IDS, labels=IDS).loss
                    loss.backward()
        gradients.append({name: item.grad for name, item in model.named_parameters()})
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(gradients[0][name], item) for name, item in gradients[1].items())
    layers = watches[0].layers()
    assert len(layers) == 14 and all(len(roles) == 3 for roles in layers.values())
    assert layers["model.layers.0.mlp.up_proj"]["weight"].amax == model.model.layers[0].mlp.up_proj.weight.abs().max()
    assert set(summary(watches[0].layers())) == {
        f"fp8_{role}_{field}"
        for role in ("input", "weight", "gradient")
        for field in ("amax", "underflow", "saturation")
    }


def test_the_first_step_of_delayed_scaling_flushes_most_of_the_gradients(llama):
    model, precision = llama(), choose("fp8", CPU, recipe="delayed")
    precision.convert(model)
    underflow = []
    for _ in range(2):
        with precision.watch(model) as watch:
            with precision.autocast():
                loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
        underflow.append(summary(watch.layers())["fp8_gradient_underflow"])
    assert underflow[0] > 0.3 and underflow[1] < 0.01


def test_a_precision_that_casts_nothing_sees_nothing(llama):
    model = llama()
    for name in ("fp32", "bf16"):
        precision = choose(name, CPU)
        with precision.watch(model) as watch:
            model(input_ids=IDS)
        assert watch.layers() == {} and summary(watch.layers()) == {}


def test_ranks_are_merged_to_the_worst_of_each_tensor():
    one = {"a": {"input": TensorNumerics(1.0, 0.5, 0.0)}, "b": {"input": TensorNumerics(9.0, 0.0, 0.0)}}
    two = {"a": {"input": TensorNumerics(2.0, 0.1, 0.2), "weight": TensorNumerics(math.nan, 0.0, 0.0)}}
    merged = merge([one, two])
    assert merged["a"]["input"] == TensorNumerics(2.0, 0.5, 0.2) and merged["b"] == one["b"]
    assert math.isnan(merged["a"]["weight"].amax) and "fp8_weight_amax" not in summary(merged)
    assert math.isnan(merged["a"]["weight"].worst(TensorNumerics(1.0, 0.0, 0.0)).amax)
