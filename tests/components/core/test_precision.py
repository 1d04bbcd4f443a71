"""Number formats: the bits of fp8 against a hand-written reference, conversion both ways, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core.batch import PAD, accept_pads, loss_sum, make_batch
from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.core.precision import choose

CPU = torch.device("cpu")
E4M3, E5M2 = (4, 3, 448.0), (5, 2, 57344.0)


def llama(seed: int = 0, **fields: object) -> LlamaForCausalLM:
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **fields}))


def sample(length: int, seed: int = 0, documents: int = 2) -> Sample:
    """A sample of some equally long documents with every label but each document's first."""
    ids = np.random.default_rng(seed).integers(0, 64, length)
    positions = np.concatenate([np.arange(len(part)) for part in np.array_split(ids, documents)])
    return Sample(ids, np.where(positions == 0, IGNORE, ids), positions)


def values_of(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Every finite non-negative value of a float format, by its definition, in order."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        found.append(value)
    return np.array([value for value in found if value <= largest])


def quantise(values: np.ndarray, format: tuple[int, int, float]) -> np.ndarray:
    """Reference: scale by fp32(largest / amax), saturate, round to nearest with ties to even, give fp32 values."""
    largest = format[2]
    amax = float(np.abs(values).max())
    scale = np.float32(np.float64(largest) / max(amax, 1e-12))
    scaled = np.clip(values.astype(np.float32) * scale, np.float32(-largest), np.float32(largest)).astype(np.float64)
    grid = values_of(*format)
    high = np.searchsorted(grid, np.abs(scaled)).clip(0, len(grid) - 1)
    low = (high - 1).clip(0)
    below, above = np.abs(scaled) - grid[low], grid[high] - np.abs(scaled)
    nearest = np.where(below < above, low, np.where(above < below, high, np.where(low % 2 == 0, low, high)))
    return np.copysign(grid[nearest], scaled)


@pytest.mark.parametrize(("dtype", "format"), [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_quantised_bits_are_those_of_the_reference(dtype, format, spread):
    torch.manual_seed(1)
    tensor = torch.randn(64, 48) * torch.exp(spread * torch.randn(64, 48))
    quantised = hp_tensor_to_float8_dynamic(
        tensor, dtype, LinearMMConfig(), scaling_granularity=ScalingGranularity.TENSORWISE
    )
    found = quantised._data.to(torch.float64).numpy()
    assert np.array_equal(found, quantise(tensor.numpy(), format))
    assert np.array_equal(np.signbit(found), np.signbit(tensor.numpy()))


def test_a_converted_linear_multiplies_the_quantised_operands():
    model = llama()
    choose("fp8", CPU).convert(model)
    linear = model.model.layers[1].mlp.up_proj
    assert type(linear) is Float8Linear
    x = torch.randn(32, 64, requires_grad=True)
    out = linear(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)

    def dequantised(tensor: torch.Tensor, format: tuple[int, int, float]) -> np.ndarray:
        scale = np.float32(np.float64(format[2]) / float(tensor.detach().abs().max()))
        return quantise(tensor.detach().numpy(), format) / np.float64(scale)

    x8, w8, g8 = dequantised(x, E4M3), dequantised(linear.weight, E4M3), dequantised(gradient, E5M2)
    np.testing.assert_allclose(out.detach().numpy(), x8 @ w8.T, rtol=0, atol=1e-5 * np.abs(out.detach().numpy()).max())
    assert x.grad is not None and linear.weight.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), g8 @ w8, rtol=0, atol=1e-5 * float(x.grad.abs().max()))
    np.testing.assert_allclose(
        linear.weight.grad.numpy(), g8.T @ x8, rtol=0, atol=1e-5 * float(linear.weight.grad.abs().max())
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_recipe_asked_for_is_the_one_that_runs(recipe):
    model = llama()
    choose("fp8", CPU, recipe=recipe).convert(model)
    config = model.model.layers[0].mlp.up_proj.config
    assert config.emulate
    wanted = ScalingGranularity.AXISWISE if recipe == "rowwise" else ScalingGranularity.TENSORWISE
    assert config.cast_config_input.scaling_granularity is wanted
    assert config.cast_config_weight.scaling_granularity is wanted
    gradients = torch.float8_e4m3fn if recipe == "rowwise" else torch.float8_e5m2
    assert config.cast_config_grad_output.target_dtype == gradients


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_conversion_and_back_change_no_parameter_and_no_name(recipe, tmp_path):
    model = llama()
    before = dict(model.named_parameters())
    ids = torch.arange(32)[None] % 64
    plain = model(input_ids=ids).logits
    precision = choose("fp8", CPU, recipe=recipe)
    assert precision.convert(model) == 3 * 7
    assert {name: id(item) for name, item in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    quantised = model(input_ids=ids).logits
    assert not torch.equal(quantised, plain)
    precision.restore(model)
    assert not [module for module in model.modules() if isinstance(module, Float8Linear)]
    assert torch.equal(model(input_ids=ids).logits, plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits, plain)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def test_head_ends_and_narrow_layers_stay_out_of_fp8():
    model = llama(tie_word_embeddings=False)
    choose("fp8", CPU, keep_first=1, keep_last=1, minimum_features=64).convert(model)
    wide = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert converted(model) == {f"model.layers.1.{name}" for name in wide}


def test_names_say_what_runs():
    assert choose("fp32", CPU).name == "fp32"
    assert choose("bf16", CPU).name == "bf16"
    fp8 = choose("fp8", CPU)
    assert (fp8.name, fp8.speed_name) == ("fp8-torchao-emulated", "emulation_tokens_per_second")
    higher = fp8.fallback()
    assert higher is not None and higher.name == "fp32" and higher.fallback() is None


def test_a_gpu_without_fp8_units_is_refused_and_one_with_them_is_not_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"A100.*8\.0.*precision bf16"):
        choose("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    real = choose("fp8", torch.device("cuda"))
    assert (real.name, real.emulated, real.speed_name) == ("fp8-torchao", False, "tokens_per_second")


def test_bf16_multiplies_in_bf16_and_keeps_fp32_parameters():
    model = llama()
    precision = choose("bf16", CPU)
    assert precision.convert(model) == 0
    with precision.autocast():
        assert model.model.layers[0].mlp.up_proj(torch.randn(4, 64)).dtype == torch.bfloat16
    assert {item.dtype for item in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"intermediate_size": 100}, "intermediate_size is 100; nearest: 96 or 112"),
        (
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 9},
            "hidden_size is 72; nearest: 64 or 80",
        ),
        (
            {"num_key_value_heads": 1, "head_dim": 40},
            r"num_attention_heads x head_dim is 160|head_dim is 40; nearest: 32 or 48",
        ),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"num_hidden_layers": 2}, "leaves none of 2"),
    ],
)
def test_a_model_that_fp8_cannot_hold_is_refused(fields, words):
    config = llama(**fields).config
    keep = 1 if "num_hidden_layers" in fields else 0
    with pytest.raises(ValueError, match=words):
        choose("fp8", CPU, keep_first=keep, keep_last=keep).check(config)


def test_fp8_without_a_layer_to_run_in_it_is_refused():
    with pytest.raises(ValueError, match="nothing would run in fp8"):
        choose("fp8", CPU, minimum_features=4096).convert(llama())


class Amax:
    """The largest magnitude of every tensor that torchao casts, in order, while patched in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchao.float8 import float8_scaling_utils

        self.seen: list[float] = []
        real = float8_scaling_utils.tensor_to_scale

        def watch(tensor, *args, **kwargs):
            self.seen.append(float(tensor.detach().abs().max()))
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", watch)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_pads_that_align_a_micro_batch_are_kept_out_of_the_scaling(monkeypatch, recipe):
    """4,092 tokens become 4,096; loss, gradients and every amax stay those of the 4,092."""
    amax = Amax(monkeypatch)
    samples = [sample(4092, documents=12)]
    results = []
    for multiple in (1, 16):
        model = llama(num_hidden_layers=1, max_position_embeddings=4096)
        accept_pads(model)
        choose("fp8", CPU, recipe=recipe).convert(model)
        batch = make_batch(samples, multiple)
        amax.seen.clear()
        loss = loss_sum(model, *batch.tensors(CPU))
        (loss / batch.labels).backward()
        gradients = {name: item.grad for name, item in model.named_parameters()}
        results.append((batch, loss.item(), list(amax.seen), gradients))
    (plain, loss, seen, gradients), (padded, padded_loss, padded_seen, padded_gradients) = results
    assert (plain.input_ids.numel(), padded.input_ids.numel()) == (4092, 4096)
    assert (padded.input_ids[0, 4092:] == PAD).all() and padded.tokens == plain.tokens
    assert math.isclose(loss, padded_loss, rel_tol=1e-6)
    assert len(seen) == 7 * 6
    assert np.allclose(seen, padded_seen, rtol=1e-5)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.allclose(gradient, padded_gradients[name], atol=1e-5 * float(gradient.abs().max())), name


def test_activations_and_gradients_of_pads_are_exactly_zero():
    model = llama()
    accept_pads(model)
    choose("fp8", CPU).convert(model)
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append(output.detach())
        output.register_hook(lambda gradient: seen.append(gradient))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    batch = make_batch([sample(27), sample(21, seed=1)], 16)
    loss_sum(model, *batch.tensors(CPU)).backward()
    is_pad = batch.input_ids == PAD
    assert is_pad.sum() == 32 * 2 - 27 - 21
    assert len(seen) == 2 * (3 * 7 + 1)
    for tensor in seen:
        assert not tensor[is_pad].any() and tensor[~is_pad].any()
