"""What fp8 does to the numbers: amax, underflow and saturation of each layer's input, weight and gradient.

A `Watch` hooks the converted linears for as long as it is open, which a training loop does every so many steps, and
casts what they cast once more by the recipe's own arithmetic (see recipes): so the figures are exact for every
backend on every device, and no number of the training changes. For TransformerEngine they are what its documented
formulas give for the tensors it is handed; its own log of statistics is a debugging feature, not used. Left out on
purpose: the products, and the gradient of the weight, which is never cast.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from crosstrain.components.core.precision.recipes import Recipe, Role, amax_of, quantise, scale_of, spread


@dataclass(frozen=True)
class TensorNumerics:
    """One tensor of one layer, over the micro-batches that were watched."""

    amax: float
    """Largest magnitude; not finite when an element is not."""
    underflow: float
    """Share of the elements that are not zero and become zero."""
    saturation: float
    """Share of the elements that are cut down to the format's largest value, Inf included."""

    def record(self) -> dict[str, float]:
        """The numbers as JSON takes them: without what is not finite."""
        return {name: value for name, value in asdict(self).items() if math.isfinite(value)}

    def worst(self, other: "TensorNumerics") -> "TensorNumerics":
        """The larger of each; a NaN is the largest."""
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        return TensorNumerics(amax, max(self.underflow, other.underflow), max(self.saturation, other.saturation))


class Watch:
    """Gathers numbers while hooked; empty for a precision that casts nothing."""

    def __init__(
        self, recipe: Recipe | None = None, scale: Callable[[str, str], torch.Tensor | None] = lambda name, role: None
    ) -> None:
        self._recipe, self._scale = recipe, scale
        self._seen: dict[tuple[str, Role], torch.Tensor] = {}

    @contextmanager
    def hooked(self, linears: dict[str, nn.Linear]) -> Iterator["Watch"]:
        """Watch these linears, by name, until the context ends."""
        handles: list[Any] = []

        def hook(name: str) -> Callable[..., None]:
            def look(module: nn.Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                if output.requires_grad:
                    handles.append(output.register_hook(lambda gradient: self._look(name, "gradient", gradient)))

            return look

        def before(name: str) -> Callable[..., None]:
            def look(module: nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
                self._look(name, "input", args[0])
                self._look(name, "weight", module.weight)

            return look

        for name, linear in linears.items():
            handles.append(linear.register_forward_pre_hook(before(name)))
            handles.append(linear.register_forward_hook(hook(name)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _look(self, name: str, role: Role, tensor: torch.Tensor) -> None:
        assert self._recipe is not None
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        tile, format = self._recipe.tiles[role], self._recipe.formats[role]
        amax = amax_of(matrix, tile)
        scale = self._scale(name, role)
        if scale is None:
            scale = scale_of(amax, format, self._recipe.rule)
        data = quantise(matrix, scale, format, tile).data
        is_nonzero = matrix != 0
        lost = is_nonzero & (data.float() == 0)
        cut = (matrix * spread(scale, tile, matrix.shape)).abs() > format.limit
        largest = torch.where(matrix.isnan().any(), torch.nan, amax.amax()).double()
        counts = torch.stack([lost.sum(), is_nonzero.sum(), cut.sum(), torch.full_like(cut.sum(), cut.numel())])
        new = torch.cat([largest.reshape(1), counts.double()])
        old = self._seen.get((name, role))
        if old is not None:
            new = torch.cat([torch.maximum(old[:1], new[:1]), old[1:] + new[1:]])
        self._seen[name, role] = new

    def layers(self) -> dict[str, dict[Role, TensorNumerics]]:
        """What was seen, by layer and role."""
        if not self._seen:
            return {}
        rows = torch.stack(list(self._seen.values())).tolist()
        found: dict[str, dict[Role, TensorNumerics]] = {}
        for (name, role), (amax, lost, nonzero, cut, total) in zip(self._seen, rows, strict=True):
            found.setdefault(name, {})[role] = TensorNumerics(amax, lost / max(nonzero, 1), cut / max(total, 1))
        return found


Layers = dict[str, dict[Role, TensorNumerics]]
"""Layer to role to numbers."""


def merge(ranks: Sequence[Layers]) -> Layers:
    """The numbers of several ranks as one: of a tensor that more than one holds, the worst."""
    found: Layers = {}
    for layers in ranks:
        for name, roles in layers.items():
            for role, item in roles.items():
                into = found.setdefault(name, {})
                into[role] = item.worst(into[role]) if role in into else item
    return found


def summary(layers: Layers) -> dict[str, float]:
    """The worst of all layers, for a training log: what is not finite is left out.

    `fp8_input_amax`, `fp8_input_underflow`, `fp8_input_saturation`, and the same of weight and gradient.
    """
    found: dict[str, float] = {}
    for roles in layers.values():
        for role, item in roles.items():
            for field, value in item.record().items():
                key = f"fp8_{role}_{field}"
                found[key] = max(found.get(key, 0.0), value)
    return found
