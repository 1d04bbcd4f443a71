"""Whether a trained adapter is what was asked for: the last word of every way to train one.

The check reads back what was written: training tools are known to write plain LoRA under DoRA's name, to lose
modules, or to train nothing, and to succeed. What must be there comes from the model in memory (peft) or from the
base's headers alone (`wanted_of`: adapters that were trained elsewhere, in pieces). Left out on purpose: whether
the adapter is any good, which evaluate measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from crosstrain.components.core.peft_adapter import Adapter, LoraModule, read_adapter
from crosstrain.components.core.storage import LocalStore, Store
from crosstrain.components.core.weights import Tensor, read_tensor

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Adapted module to its A [rank, in] and B [out, rank]."""


@dataclass(frozen=True)
class Expected:
    """What a written adapter must hold."""

    shapes: dict[str, tuple[int, int]]
    """Adapted module to the shape of its base weight."""
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    """Adapted module to its magnitudes before training; DoRA alone."""
    saved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a base tensor that is trained whole to its shape, tied ones too."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Parameter that is another one too (tied) to the name that one is known by."""
    initial: Factors = field(default_factory=dict)
    """Factors before training, where they were taken out of the base; else empty."""


def wanted_of(tensors: Mapping[str, Tensor], targets: Sequence[str]) -> Expected:
    """What a LoRA adapter of a base must hold.

    Args:
        tensors: Headers of the base's weights.
        targets: Ends of the names of the linear modules that are tuned.

    Raises:
        ValueError: the base has no such module.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for target in targets:
        found = [
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if f".{name}".endswith(f".{target}.weight") and len(tensor.shape) == 2
        ]
        if not found:
            raise ValueError(f"the base has no linear module called {target!r}; is the adapter of another model?")
        for name in found:
            rows, columns = tensors[f"{name}.weight"].shape
            shapes[name] = (rows, columns)
    return Expected(shapes)


def check_adapter(folder: Path, wanted: Expected, method: str) -> None:
    """Read an adapter back and check that it is what was asked for.

    Raises:
        ValueError: modules are missing, of a wrong shape or in excess, a tensor is not finite, B is all zero or as
            it was, or for DoRA magnitudes are missing or have not moved.
    """
    adapter = read_adapter(LocalStore(folder))
    found = {module.name: module for module in adapter.modules.values()}
    if adapter.dora != (method == "dora"):
        raise ValueError(f"the adapter says use_dora={adapter.dora}, and {method} was asked for")
    if different := wanted.shapes.keys() ^ found.keys():
        name = min(different)
        where = "is missing from" if name in wanted.shapes else "is in excess in"
        raise ValueError(f"{name} {where} the adapter ({len(found)} modules, {len(wanted.shapes)} wanted)")
    for name, module in found.items():
        if module.shape != wanted.shapes[name]:
            raise ValueError(f"{name}: the adapter fits {module.shape}, and the base's weight is {wanted.shapes[name]}")
        _check_factors(adapter.store, module, name in wanted.initial)
        if method == "dora":
            assert module.magnitude is not None  # read_adapter has seen to it
            if torch.equal(read_tensor(adapter.store, module.magnitude).flatten(), wanted.magnitudes[name].flatten()):
                raise ValueError(f"{name}: DoRA's magnitudes have not moved; was the learning rate ever above zero?")
    _check_saved(adapter, wanted)


def _check_saved(adapter: Adapter, wanted: Expected) -> None:
    found = {name: tensor.shape for name, tensor in adapter.replaced.items()}
    if found != wanted.saved:
        name = min({*found.items()} ^ {*wanted.saved.items()})[0]
        raise ValueError(f"{name}: trained whole as {wanted.saved.get(name)}, and the adapter holds {found.get(name)}")
    for name, tensor in adapter.replaced.items():
        if not torch.isfinite(read_tensor(adapter.store, tensor)).all():
            raise ValueError(f"{name}: the adapter holds values that are not finite")


def _check_factors(store: Store, module: LoraModule, difference: bool) -> None:
    a, b = read_tensor(store, module.a), read_tensor(store, module.b)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"{module.name}: the adapter holds values that are not finite")
    half = b.shape[1] // 2
    if difference and torch.equal(b[:, :half], -b[:, half:]) and torch.equal(a[:half], a[half:]):
        raise ValueError(f"{module.name}: the factors are as they were, so nothing was learned")
    if not b.any():
        raise ValueError(f"{module.name}: B is all zero, so nothing was learned; no gradient reached the module")
