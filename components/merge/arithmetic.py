"""The merge itself: rows of base weights and an adapter's factors in, rows of merged weights out.

Products and sums are in FP32 and rounded once, to the base's type. For linear layers these are the bits of peft's
`merge_and_unload(safe_merge=False)`; `safe_merge=True`, and peft's merge of an embedding in either form, round the
update first and the sum again, which is less accurate. Several adapters are one of all their ranks side by side, each A
times its weight and scale, as peft's `add_weighted_adapter(combination_type="cat")` builds it (which rounds those
factors to the base's type, where that is not FP32; here they stay FP32). Reading, computing and writing overlap, and
what is in memory at a time is a few blocks of rows, whatever the model's size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from crosstrain.components.core.storage import Store
from crosstrain.components.core.weights import (
    BLOCK_BYTES,
    DTYPES,
    ahead,
    read_bytes,
    read_rows,
    read_tensor,
    row_blocks,
)
from crosstrain.components.merge.plan import Change, Edit

_FP32_BYTES = 4


@dataclass(frozen=True)
class Factors:
    """What is added to one tensor, in FP32."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""
    scale: float
    magnitude: torch.Tensor | None
    """[out]"""
    embedding: bool


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of one tensor, as read."""

    edit: Edit
    start: int
    stop: int
    weight: torch.Tensor
    factors: Factors | None


def merge_rows(weight: torch.Tensor, factors: Factors, start: int, stop: int) -> torch.Tensor:
    """Merged rows [start, stop), in the type of `weight`.

    LoRA: `W + s * (B @ A)`. DoRA: with `V = W + s * (B @ A)`, `V * magnitude / ||V||` a row.

    Args:
        weight: The base's rows [stop - start, in]; changed in place.
        factors: The module's factors.
        start: First row.
        stop: End of the rows.
    """
    if factors.embedding:
        delta = (factors.b @ factors.a[:, start:stop]).T * factors.scale
    else:
        delta = factors.b[start:stop] @ factors.a * factors.scale
    if factors.magnitude is None:
        return weight.add_(delta)
    merged = weight + delta
    factor = factors.magnitude[start:stop] / torch.linalg.norm(merged, dim=1)
    return merged.mul_(factor.view(-1, 1)).to(weight.dtype)


def merged_bytes(edits: Sequence[Edit], base: Store) -> Iterator[np.ndarray]:
    """The bytes of the merged tensors in order, as uint8 blocks of about BLOCK_BYTES.

    Raises:
        ValueError: a merged or replaced tensor holds a value that is not finite.
    """
    return ahead(_computed(ahead(_read(edits, base))))


def _read(edits: Sequence[Edit], base: Store) -> Iterator[Rows | np.ndarray]:
    for edit in edits:
        if edit.copied:
            source = edit.source
            for at in range(0, source.bytes, BLOCK_BYTES):
                yield read_bytes(base, source.file, source.offset + at, min(BLOCK_BYTES, source.bytes - at))
            continue
        factors = _read_factors(edit.changes) if edit.changes else None
        store = edit.store or base
        row_bytes = edit.source.numel // max(edit.source.rows, 1) * _FP32_BYTES
        for start, stop in row_blocks(edit.source, row_bytes):
            yield Rows(edit, start, stop, read_rows(store, edit.source, start, stop), factors)


def _read_factors(changes: Sequence[Change]) -> Factors:
    if changes[0].alone:
        store, lora = changes[0].store, changes[0].lora
        magnitude = None if lora.magnitude is None else read_tensor(store, lora.magnitude).float().flatten()
        a, b = read_tensor(store, lora.a).float(), read_tensor(store, lora.b).float()
        return Factors(a, b, lora.scale, magnitude, lora.embedding)
    a = torch.cat([read_tensor(one.store, one.lora.a).float() * one.weight * one.lora.scale for one in changes])
    b = torch.cat([read_tensor(one.store, one.lora.b).float() for one in changes], dim=1)
    return Factors(a, b, 1.0, None, changes[0].lora.embedding)


def _computed(blocks: Iterable[Rows | np.ndarray]) -> Iterator[np.ndarray]:
    for block in blocks:
        if isinstance(block, np.ndarray):
            yield block
            continue
        dtype = getattr(torch, DTYPES[block.edit.target.dtype])
        weight = block.weight.to(dtype)
        if block.factors is not None:
            weight = merge_rows(weight, block.factors, block.start, block.stop)
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"{block.edit.target.name}: merged rows {block.start} to {block.stop} hold values that are not finite "
                f"in {dtype}; the adapter is broken (look at its training log) or does not belong to this base"
            )
        yield weight.contiguous().view(-1).view(torch.uint8).numpy()
