"""The arithmetic of scaling: bits against values worked out by hand, and properties that hold for any tensor."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from crosstrain.components.core.precision.recipes import (
    E4M3,
    E5M2,
    RECIPES,
    Format,
    amax_of,
    cast_matrix,
    quantise,
    scale_of,
    spread,
)

FORMATS = [E4M3, E5M2]
MAX = float(torch.finfo(torch.float32).max)


def grid(format: Format) -> np.ndarray:
    """Every finite non-negative value of a format, by its definition."""
    exponent_bits, mantissa_bits = (4, 3) if format is E4M3 else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    return np.array([value for value in values if value <= format.largest])


def nearest(values: np.ndarray, format: Format) -> np.ndarray:
    """Values rounded to the grid, ties to the even mantissa, saturating: in fp64, from the definition."""
    points = grid(format)
    size = np.minimum(np.abs(values), format.largest)
    high = np.searchsorted(points, size).clip(0, len(points) - 1)
    low = (high - 1).clip(0)
    below, above = size - points[low], points[high] - size
    chosen = np.where(below < above, low, np.where(above < below, high, np.where(low % 2 == 0, low, high)))
    return np.copysign(points[chosen], values)


@pytest.mark.parametrize(
    ("value", "format", "bits"),
    [
        (1.0, E4M3, 0x38), (448.0, E4M3, 0x7E), (-448.0, E4M3, 0xFE), (1e9, E4M3, 0x7E), (math.inf, E4M3, 0x7E),
        (2.0**-9, E4M3, 0x01), (2.0**-10, E4M3, 0x00), (1.5 * 2.0**-9, E4M3, 0x02), (17.0, E4M3, 0x58),
        (19.0, E4M3, 0x5A),
        (1.0, E5M2, 0x3C), (57344.0, E5M2, 0x7B), (-1e9, E5M2, 0xFB), (math.inf, E5M2, 0x7B), (2.0**-16, E5M2, 0x01),
    ],
)  # fmt: skip
def test_single_values_have_the_bits_worked_out_by_hand(value, format, bits):
    found = quantise(torch.tensor([[value]]), torch.ones(1, 1), format).data
    assert found.view(torch.uint8).item() == bits


def test_nan_stays_nan_and_does_not_touch_the_scale_of_its_neighbours():
    matrix = torch.tensor([[math.nan, 2.0], [1.0, 0.0]])
    assert amax_of(matrix).item() == 2.0
    assert amax_of(torch.tensor([[1.0, torch.nan, -torch.inf]])).item() == torch.inf, "Inf counts beside a NaN, too"
    found = cast_matrix(matrix, "input", RECIPES["current"])
    assert found.data.float()[0, 0].isnan() and found.dequantise()[0, 1] == 2.0


@pytest.mark.parametrize(
    ("amax", "format", "rule", "scale"),
    [
        (448.0, E4M3, "exact", 1.0),
        (3.0, E4M3, "exact", float(np.float32(448) / np.float32(3))),
        (0.0, E4M3, "exact", 1.0),
        (math.inf, E4M3, "exact", 1.0),
        (1e-40, E4M3, "exact", MAX),
        (3.0, E5M2, "exact", float(np.float32(57344) / np.float32(3))),
        (448.0, E4M3, "power of two", 1.0),
        (449.0, E4M3, "power of two", 0.5),
        (3.0, E4M3, "power of two", 128.0),
        (3.5, E4M3, "power of two", 128.0),
        (3.6, E4M3, "power of two", 64.0),
        (0.0, E4M3, "power of two", 1.0),
        (math.inf, E4M3, "power of two", 1.0),
        (1e-40, E4M3, "power of two", 2.0**127),
        (448.0, E4M3, "e8m0", 1.0),
        (449.0, E4M3, "e8m0", 0.5),
        (447.0, E4M3, "e8m0", 1.0),
        (3.6, E4M3, "e8m0", 64.0),
        (0.0, E4M3, "e8m0", 2.0**127),
        (math.inf, E4M3, "e8m0", 2.0**-127),
    ],
)
def test_scales_worked_out_by_hand(amax, format, rule, scale):
    assert scale_of(torch.tensor([[amax]]), format, rule).item() == scale


FINITE = st.floats(-(2.0**50), 2.0**50, width=32).map(lambda value: 0.0 if abs(value) < 1e-9 else value)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    seed, spread_ = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 3.0, 12.0]))
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(rows, columns, generator=generator) for _ in range(2)]
    return normal[0] * torch.exp(spread_ * normal[1]) * draw(FINITE)


@settings(max_examples=120, deadline=None)
@given(matrices(), st.sampled_from(["input", "gradient"]), st.sampled_from(["current", "rowwise", "block", "mxfp8"]))
def test_any_matrix_is_rounded_to_the_nearest_of_the_format_and_never_saturates(matrix, role, name):
    recipe = RECIPES[name]
    format, found = recipe.formats[role], cast_matrix(matrix, role, recipe)
    scale = found.inverse.double().reciprocal()
    if name == "current":
        scale = scale_of(amax_of(matrix), format, "exact").double()
    scaled = matrix.float() * spread(scale.float(), recipe.tiles[role], matrix.shape)
    assert scaled.abs().max() <= format.largest * (1 + 2**-22), "scaling alone saturates nothing"
    assert np.array_equal(found.data.double().numpy(), nearest(scaled.double().numpy(), format))


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from(["block", "mxfp8", "rowwise"]))
def test_block_scales_are_powers_of_two_and_use_the_format_to_within_a_factor_two(matrix, name):
    recipe = RECIPES[name]
    amax = amax_of(matrix, recipe.tiles["input"])
    scale = scale_of(amax, E4M3, recipe.rule)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    used = (amax * scale)[amax > 0]
    assert ((used > E4M3.largest / 2 * (1 - 2**-20)) & (used <= E4M3.largest)).all()


def test_tiles_have_scales_of_their_own_edges_included():
    matrix = torch.zeros(130, 200)
    matrix[0, 0], matrix[0, 130], matrix[129, 199] = 448.0, 7.0, 28.0
    rows = amax_of(matrix, (1, 128))
    assert rows.shape == (130, 2) and rows[0].tolist() == [448.0, 7.0] and rows[129].tolist() == [0.0, 28.0]
    square = amax_of(matrix, (128, 128))
    assert square.tolist() == [[448.0, 7.0], [0.0, 28.0]]
    spread_out = spread(square, (128, 128), matrix.shape)
    assert spread_out.shape == matrix.shape
    assert (spread_out[:128, :128] == 448).all() and (spread_out[128:, 128:] == 28).all()
    found = cast_matrix(matrix, "weight", RECIPES["block"])
    assert torch.equal(found.dequantise(), matrix)
    assert found.inverse.reciprocal().tolist() == [[1.0, 64.0], [1.0, 16.0]]


def test_vectors_of_a_transpose_are_other_vectors_and_squares_are_not():
    torch.manual_seed(0)
    matrix = torch.randn(256, 256) * torch.exp(3 * torch.randn(256, 256))
    block = RECIPES["block"]
    turned = cast_matrix(matrix.t(), "input", block).dequantise().t()
    assert not torch.equal(turned, cast_matrix(matrix, "input", block).dequantise())
    square = cast_matrix(matrix.t(), "weight", block).dequantise().t()
    assert torch.equal(square, cast_matrix(matrix, "weight", block).dequantise())
    assert block.is_square("weight") and not block.is_square("input")


@pytest.mark.parametrize("format", FORMATS)
def test_torchaos_tensorwise_scale_and_bits_are_currents(format):
    """So that recipe current runs on torchao where TransformerEngine cannot."""
    torch.manual_seed(3)
    for index in range(200):
        matrix = torch.randn(16, 24) * torch.exp((index % 7) * torch.randn(16, 24))
        theirs = hp_tensor_to_float8_dynamic(
            matrix, format.dtype, LinearMMConfig(), scaling_granularity=ScalingGranularity.TENSORWISE
        )
        scale = scale_of(amax_of(matrix), format, "exact")
        assert torch.equal(theirs._scale.reshape(1, 1), scale)
        assert torch.equal(theirs._data.view(torch.uint8), quantise(matrix, scale, format).data.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_torchaos_rowwise_scales_are_the_references(format):
    torch.manual_seed(4)
    matrix = torch.randn(64, 24) * torch.exp(3 * torch.randn(64, 1))
    theirs = hp_tensor_to_float8_dynamic(
        matrix, format.dtype, LinearMMConfig(), scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    assert torch.equal(theirs._scale.reshape(64, 1), scale_of(amax_of(matrix, (1, 0)), format, "power of two"))


def test_an_inf_scales_its_tensor_by_one_and_saturates_where_torchao_gives_nan():
    matrix = torch.tensor([[math.inf, 3.0]])
    found = cast_matrix(matrix, "input", RECIPES["current"]).dequantise()
    assert found.tolist() == [[448.0, 3.0]]
    theirs = hp_tensor_to_float8_dynamic(
        matrix, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=ScalingGranularity.TENSORWISE
    )
    assert (theirs._data.float() / theirs._scale).isnan().any()
    block = cast_matrix(torch.tensor([[math.inf] + [3.0] * 255]), "input", RECIPES["block"]).dequantise()
    assert block[0, 0] == 448.0 and block[0, 255] == 3.0, "the other block keeps its own scale"
