"""The reference recipes as they train: products of quantised operands, delayed scales step by step, what is refused."""

import copy
import math

import pytest
import torch
from torch import nn

from crosstrain.components.core.batch import accept_pads, loss_sum, make_batch
from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.core.precision import Precision, Surroundings, choose
from crosstrain.components.core.precision.delayed import Scales, update_history
from crosstrain.components.core.precision.emulated import EmulatedFp8, EmulatedLinear
from crosstrain.components.core.precision.recipes import E4M3, E5M2, RECIPES, amax_of, cast_matrix, quantise, scale_of

CPU = torch.device("cpu")
IDS = torch.arange(64)[None] % 64


def fp8(recipe: str = "delayed", **options: int) -> EmulatedFp8:
    found = choose("fp8", CPU, recipe=recipe, **{"amax_history": 4, **options})
    assert isinstance(found, EmulatedFp8)
    return found


class One(nn.Module):
    """A model of one linear, which is all of its only block."""

    def __init__(self, rows: int = 128, columns: int = 256) -> None:
        super().__init__()
        block = nn.Module()
        block.proj = nn.Linear(columns, rows, bias=True)
        self.layers = nn.ModuleList([block])

    def get_decoder(self) -> "One":
        return self

    @property
    def linear(self) -> nn.Linear:
        return self.layers[0].proj  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_products_are_those_of_the_quantised_operands(recipe):
    """Each operand is cast along the dimension that its product sums over."""
    torch.manual_seed(0)
    model, precision, rules = One(), fp8(recipe), RECIPES[recipe]
    precision.convert(model)
    x = (torch.randn(2, 128, 256) * torch.exp(2 * torch.randn(2, 128, 256))).requires_grad_()
    with precision.autocast():
        output = model.linear(x)
    gradient = torch.randn_like(output) * torch.exp(2 * torch.randn_like(output))
    output.backward(gradient)

    def cast(matrix: torch.Tensor, role: str, turned: bool = False) -> torch.Tensor:
        if turned:
            return cast_matrix(matrix.t(), role, rules).dequantise().t().double()
        return cast_matrix(matrix, role, rules).dequantise().double()

    flat, g, weight = x.detach().reshape(-1, 256), gradient.reshape(-1, 128), model.linear.weight.detach()
    wanted = {
        "output": (output, cast(flat, "input") @ cast(weight, "weight").t() + model.linear.bias),
        "input": (x.grad, cast(g, "gradient") @ cast(weight, "weight", turned=True)),
        "weight": (model.linear.weight.grad, cast(g, "gradient", turned=True).t() @ cast(flat, "input", turned=True)),
        "bias": (model.linear.bias.grad, g.sum(0).double()),
    }
    for name, (found, reference) in wanted.items():
        assert found is not None
        atol = 2e-6 * float(reference.detach().abs().max())
        assert torch.allclose(found.reshape(reference.shape).double(), reference, rtol=0, atol=atol), name


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_swap_and_back_are_exact_and_names_say_emulated(llama, recipe):
    model, precision = llama(), fp8(recipe)
    before = {name: id(item) for name, item in model.named_parameters()}
    plain = model(input_ids=IDS).logits
    assert precision.convert(model) == 14
    assert {name: id(item) for name, item in model.named_parameters()} == before
    assert not torch.equal(model(input_ids=IDS).logits, plain)
    precision.restore(model)
    assert torch.equal(model(input_ids=IDS).logits, plain)
    assert not [module for module in model.modules() if isinstance(module, EmulatedLinear)]
    assert (precision.name, precision.speed_name) == (f"fp8-{recipe}-emulated", "emulation_tokens_per_second")
    assert precision.token_multiple == RECIPES[recipe].alignment


def note(history: torch.Tensor, amax: float) -> None:
    history[0] = torch.maximum(history[0], torch.tensor([amax]))


def test_a_delayed_scale_follows_its_history_as_worked_out_by_hand():
    """History of 3. Each row: the pass's amax, then the scale that the next pass has."""
    history, scale = torch.zeros(3, 1), torch.ones(1)
    worked = [(2.0, 224.0), (4.0, 112.0), (1.0, 112.0), (0.0, 112.0), (0.5, 112.0), (0.5, 448.0), (0.25, 896.0)]
    seen = []
    for amax, _ in worked:
        note(history, amax)
        update_history(history, scale, (E4M3,))
        seen.append(scale.item())
    assert seen == [224.0, 112.0, 112.0, 112.0, 112.0, 448.0, 896.0] == [wanted for _, wanted in worked]
    assert history.tolist() == [[0.0], [0.5], [0.25]]


def test_one_inf_freezes_a_scale_until_it_has_rolled_out():
    history, scale = torch.zeros(4, 1), torch.full((1,), 7.0)
    seen = []
    for amax in (math.inf, 1.0, 1.0, 1.0, 2.0):
        note(history, amax)
        update_history(history, scale, (E5M2,))
        seen.append(scale.item())
    assert seen == [7.0, 7.0, 7.0, 7.0, 28672.0]


def test_a_scale_beyond_fp32_is_fp32s_largest():
    history, scale = torch.zeros(2, 1), torch.ones(1)
    note(history, 1e-40)
    update_history(history, scale, (E4M3,))
    assert scale.item() == torch.finfo(torch.float32).max


def step(precision: Precision, model: One, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    with precision.autocast():
        output = model.linear(x)
    output.backward(gradient)
    return output.detach()


def test_delayed_scales_of_a_step_come_from_the_steps_before():
    torch.manual_seed(1)
    model, precision = One(), fp8()
    precision.convert(model)
    scales = precision.scales["layers.0.proj"]
    x, gradient = torch.randn(16, 256), torch.full((16, 128), 1e-7)
    step(precision, model, x, gradient)
    weight = model.linear.weight.detach()
    assert scales.scale["forward"].tolist() == [
        scale_of(amax_of(x), E4M3, "exact").item(), scale_of(amax_of(weight), E4M3, "exact").item(), 1.0,
    ]  # fmt: skip
    assert model.linear.weight.grad is not None and not model.linear.weight.grad.any(), "scale 1 flushed the gradient"
    assert scales.scale["backward"][0] == torch.tensor(57344.0) / torch.tensor(1e-7)
    used = {role: scales.of(role) for role in ("input", "weight")}
    larger = step(precision, model, 3 * x, gradient)
    assert model.linear.weight.grad.any(), "the second step's is not flushed"
    x_q = quantise(3 * x, used["input"], E4M3).dequantise()
    assert x_q.abs().max() < 0.5 * (3 * x).abs().max(), "a stale scale saturates"
    wanted = x_q @ quantise(weight, used["weight"], E4M3).dequantise().t() + model.linear.bias
    assert torch.allclose(larger, wanted, atol=1e-4)


def test_scales_move_once_a_micro_batch_and_not_in_validation():
    model, precision = One(), fp8()
    precision.convert(model)
    scales = precision.scales["layers.0.proj"]
    for amax in (2.0, 1.0):
        step(precision, model, torch.full((16, 256), amax), torch.ones(16, 128))
    assert scales.history["forward"][:, 0].tolist() == [0.0, 0.0, 2.0, 1.0]
    with torch.no_grad(), precision.autocast():
        model.linear(torch.full((16, 256), 8.0))
    assert scales.history["forward"][:, 0].tolist() == [8.0, 0.0, 2.0, 1.0]
    assert scales.scale["forward"][0] == 224.0
    step(precision, model, torch.full((16, 256), 1.0), torch.ones(16, 128))
    assert scales.scale["forward"][0] == 56.0, "what validation saw counts with the next pass, as in TransformerEngine"


def test_gradient_scales_move_when_the_first_layers_backward_ends(llama):
    model, precision = llama(num_hidden_layers=1), fp8()
    precision.convert(model)
    order: list[str] = []
    real = precision.update
    precision.update = lambda side: (order.append(side), real(side))  # type: ignore[method-assign, assignment, func-returns-value]
    with precision.autocast():
        loss = model(input_ids=IDS, labels=IDS).loss
    assert order == ["forward"]
    loss.backward()
    assert order == ["forward", "backward"]
    for scales in precision.scales.values():
        assert scales.history["backward"][0, 0] == 0 and scales.scale["backward"][0] != 1


def test_state_takes_a_run_on_bit_for_bit_and_stands_through_a_fallback(llama):
    def run(model: nn.Module, precision: Precision, steps: int) -> list[float]:
        losses = []
        for index in range(steps):
            ids = (IDS * (index + 3)) % 64
            with precision.autocast():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        return losses

    model, precision = llama(), fp8()
    precision.convert(model)
    run(model, precision, 2)
    saved = precision.state()
    precision.restore(model)
    assert all(torch.equal(value, saved[name]) for name, value in precision.state().items())
    twin, again = copy.deepcopy(model), fp8()
    again.load_state(saved)
    again.convert(twin)
    precision.convert(model)
    assert run(twin, again, 3) == run(model, precision, 3)
    fresh = fp8()
    fresh.convert(llama())
    assert any(not torch.equal(value, saved[name]) for name, value in fresh.state().items())
    with pytest.raises(ValueError, match="another fp8_recipe or fp8_amax_history"):
        fp8(amax_history=8).load_state(saved)


def test_layers_named_by_a_fallback_leave_fp8_alone(llama):
    model, precision = llama(), fp8("block")
    names = frozenset({"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"})
    partial = precision.fallback(names)
    assert partial.name == "fp8-block-emulated, 2 modules in fp32"
    assert partial.convert(model) == 12
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == {*names, "lm_head"}
    with partial.autocast():
        model(input_ids=IDS)
    partial.restore(model)
    assert not [module for module in model.modules() if isinstance(module, EmulatedLinear)]
    higher = partial.fallback()
    assert higher is not None and higher.name == "fp32"


@pytest.mark.parametrize(
    ("recipe", "fields", "around", "words"),
    [
        ("block", {"hidden_size": 192, "head_dim": 64}, {}, "128: hidden_size is 192; nearest: 128 or 256"),
        ("block", {"num_key_value_heads": 1}, {}, r"num_key_value_heads x head_dim is 64; nearest: 128$"),
        ("mxfp8", {"intermediate_size": 80}, {}, "multiples of 32: intermediate_size is 80; nearest: 64 or 96"),
        ("delayed", {"intermediate_size": 100}, {}, "multiples of 16: intermediate_size is 100; nearest: 96 or 112"),
        ("delayed", {}, {"recompute": True}, "recomputed in backward.*use fp8_recipe current"),
        ("block", {}, {"tensor_parallel": 2}, "tensor_parallel 2 use fp8_recipe tensorwise"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_hold_is_refused_with_what_it_can(llama, recipe, fields, around, words):
    with pytest.raises(ValueError, match=words):
        fp8(recipe).check(llama(**fields).config, Surroundings(**around))


def sample(length: int) -> Sample:
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    positions = torch.arange(length).numpy()
    labels = ids.copy()
    labels[0] = IGNORE
    return Sample(ids, labels, positions)


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_pads_that_align_a_micro_batch_change_no_amax_and_no_gradient(llama, recipe):
    """500 tokens become 512."""
    results = []
    for multiple in (1, RECIPES[recipe].alignment):
        model, precision = llama(num_hidden_layers=1), fp8(recipe)
        accept_pads(model)
        precision.convert(model)
        batch = make_batch([sample(500)], multiple)
        for _ in range(2):  # the second step has delayed scales that differ from 1
            model.zero_grad()
            with precision.watch(model) as watch, precision.autocast():
                loss = loss_sum(model, *batch.tensors(CPU)) / batch.labels
                loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad
        results.append((batch.input_ids.numel(), loss.item(), watch.layers(), gradient))
    (short, loss, seen, gradient), (long, padded_loss, padded_seen, padded_gradient) = results
    assert (short, long) == (500, 512)
    assert math.isclose(loss, padded_loss, rel_tol=1e-5)
    for name, layer in seen.items():
        for role, tensor in layer.items():
            assert math.isclose(tensor.amax, padded_seen[name][role].amax, rel_tol=1e-4), (name, role)
    assert torch.allclose(gradient, padded_gradient, atol=2e-2 * float(gradient.abs().max()))


def test_scales_have_the_layout_of_transformer_engine():
    scales = Scales(4)
    assert [len(scales.scale[side]) for side in ("forward", "backward")] == [3, 2]
