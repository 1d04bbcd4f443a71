"""The arithmetic of fp8 scaling recipes, bit for bit as TransformerEngine 2.20 and torchao define them, in plain torch.

Recipes here are numbers and functions of tensors: what a scale is for an amax, which tile of a tensor shares one, and
which format a tensor goes to. On a CPU the emulated backend multiplies with them; anywhere they tell what a cast does
to a tensor (see numerics). Source: TransformerEngine's common/recipe/__init__.py, recipe_common.cuh and
quantize_mxfp8.cuh; torchao's float8_scaling_utils.py. Left out on purpose: NVFP4, stochastic rounding, every product.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from crosstrain.components.core.precision.base import RecipeName

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
Rule = Literal["exact", "power of two", "e8m0"]

_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23
_HALF_SMALLEST_NORMAL = 0x00400000
"""Bits of 2^-127, which fp32 has as a subnormal only."""
LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    """An 8-bit float."""

    dtype: torch.dtype
    largest: float
    """Largest finite value."""
    limit: float
    """Magnitudes above it are further from `largest` than rounding accounts for: a cast loses their size."""


E4M3 = Format(torch.float8_e4m3fn, 448.0, 464.0)
E5M2 = Format(torch.float8_e5m2, 57344.0, 61440.0)


@dataclass(frozen=True)
class Recipe:
    """How the three tensors of a linear layer go to fp8."""

    formats: dict[Role, Format]
    tiles: dict[Role, tuple[int, int]]
    """Rows and columns that share a scale, of the matrix [tokens or outputs, features]; 0: all of them."""
    rule: Rule = "exact"
    """What becomes of largest / amax. Powers of two round towards the smaller scale, so that nothing saturates."""
    delayed: bool = False
    """Whether scales come from amaxes of earlier passes."""
    alignment: int = 16
    """What features and tokens must be multiples of."""

    def is_square(self, role: Role) -> bool:
        """Whether a matrix and its transpose quantise alike, so that one cast serves both."""
        rows, columns = self.tiles[role]
        return rows == columns


_HYBRID: dict[Role, Format] = {"input": E4M3, "weight": E4M3, "gradient": E5M2}
_ALL_E4M3: dict[Role, Format] = {"input": E4M3, "weight": E4M3, "gradient": E4M3}


def _tiles(vector: tuple[int, int], weight: tuple[int, int]) -> dict[Role, tuple[int, int]]:
    return {"input": vector, "weight": weight, "gradient": vector}


_CURRENT = Recipe(_HYBRID, _tiles((0, 0), (0, 0)))
RECIPES: dict[RecipeName, Recipe] = {
    "tensorwise": _CURRENT,
    "current": _CURRENT,
    "rowwise": Recipe(_ALL_E4M3, _tiles((1, 0), (1, 0)), "power of two"),
    "delayed": Recipe(_HYBRID, _tiles((0, 0), (0, 0)), delayed=True),
    "block": Recipe(_ALL_E4M3, _tiles((1, 128), (128, 128)), "power of two", alignment=128),
    "mxfp8": Recipe(_ALL_E4M3, _tiles((1, 32), (1, 32)), "e8m0", alignment=32),
}


class Quantised(NamedTuple):
    """A matrix in fp8 and what its tiles are to be multiplied with to have it back."""

    data: torch.Tensor
    """[M, K], fp8."""
    inverse: torch.Tensor
    """[tiles down, tiles across], fp32: one over each tile's scale."""
    tile: tuple[int, int]

    def dequantise(self) -> torch.Tensor:
        """The matrix [M, K] in fp32."""
        return self.data.float() * spread(self.inverse, self.tile, self.data.shape)


def amax_of(matrix: torch.Tensor, tile: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """Largest magnitude of each tile of a matrix [M, K], [tiles down, tiles across]; NaN is passed over, as in CUDA."""
    height, width = _whole(tile, matrix.shape)
    rows, columns = matrix.shape
    padded = functional.pad(matrix.detach().float().abs(), (0, -columns % width, 0, -rows % height))
    tiled = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    found = tiled.amax((1, 3))
    if bool(found.isnan().any()):
        found = tiled.nan_to_num(nan=0.0, posinf=torch.inf).amax((1, 3))
    return found


def scale_of(amax: torch.Tensor, format: Format, rule: Rule) -> torch.Tensor:
    """The factors that take amaxes to a format's largest value; amax 0 or inf has 1 (e8m0: 2^127 and 2^-127).

    The quotient is fp32's, correctly rounded: `largest / tensor` in Python is not, in 29% of cases.
    """
    if rule == "e8m0":
        exponent = _e8m0(amax, format)
        bits = torch.where(exponent == 254, _HALF_SMALLEST_NORMAL, (254 - exponent) << _MANTISSA_BITS)
        return bits.to(torch.int32).view(torch.float32)
    scale = torch.full_like(amax, format.largest) / amax
    scale = scale.clamp(max=LARGEST_FP32)
    if rule == "power of two":
        scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def _e8m0(amax: torch.Tensor, format: Format) -> torch.Tensor:
    """Biased exponent of the power of two at or above amax / largest, as MXFP8 stores it."""
    value = amax * torch.full_like(amax, 1.0 / format.largest)
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & (1 << _MANTISSA_BITS) - 1
    is_up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= _HALF_SMALLEST_NORMAL))
    return torch.where(value.isinf(), 254, exponent + is_up)


def quantise(matrix: torch.Tensor, scale: torch.Tensor, format: Format, tile: tuple[int, int] = (0, 0)) -> Quantised:
    """Cast a matrix [M, K] with a scale for each tile: round to nearest even, saturate, keep NaN.

    Args:
        matrix: [M, K].
        scale: [tiles down, tiles across], fp32.
        format: Of the result.
        tile: As in Recipe.
    """
    scaled = matrix.detach().float() * spread(scale, tile, matrix.shape)
    data = scaled.clamp(-format.largest, format.largest).to(format.dtype)
    return Quantised(data, scale.reciprocal(), tile)


def cast_matrix(matrix: torch.Tensor, role: Role, recipe: Recipe, scale: torch.Tensor | None = None) -> Quantised:
    """A matrix as a recipe casts it; `scale` [1, 1] is given when it is delayed."""
    tile, format = recipe.tiles[role], recipe.formats[role]
    if scale is None:
        scale = scale_of(amax_of(matrix, tile), format, recipe.rule)
    return quantise(matrix, scale, format, tile)


def spread(values: torch.Tensor, tile: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Values of tiles for every element of a matrix [M, K]: broadcastable to it."""
    if values.numel() == 1:
        return values
    height, width = _whole(tile, shape)
    rows = values if height == 1 else values.repeat_interleave(height, 0)[: shape[0]]
    return rows if width == shape[1] else rows.repeat_interleave(width, 1)[:, : shape[1]]


def _whole(tile: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    return tile[0] or max(1, shape[0]), tile[1] or max(1, shape[1])
