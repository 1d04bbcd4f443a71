"""Which ranks hold what: the degrees of a layout, checked against model and batch before anything is built.

Pure arithmetic without torch, so that a preflight can run it anywhere. A layout that cannot be is refused with the
reason and the nearest one that can: nearest in the sum of the degrees' distances, each counted in doublings.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crosstrain.components.core.parallel.options import DataParallelOptions, ModelParallelOptions, Schedule


@dataclass(frozen=True)
class Work:
    """What a layout has to hold beside the model."""

    global_batch: int
    """Sequences an optimizer step."""
    micro_batch: int
    """Sequences a forward pass at most."""
    schedule: Schedule = "1f1b"
    alignment: int = 1
    """What the local sizes of matrix products must be multiples of; 1: anything (see Precision.token_multiple)."""
    minimum_features: int = 1
    """Products with fewer features than this are not held to the alignment."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of processes."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    """Sequences of one rank's forward pass."""
    micro_batches: int = 1
    """Forward passes of a rank in an optimizer step."""
    schedule: Schedule = "1f1b"

    @property
    def world(self) -> int:
        """Processes."""
        return self.replicate * self.shard * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Parts that a global batch is dealt into."""
        return self.replicate * self.shard

    def degrees(self) -> dict[str, int]:
        """Option to degree."""
        return {
            "data_parallel_replicate": self.replicate,
            "data_parallel_shard": self.shard,
            "tensor_parallel": self.tensor,
            "pipeline_parallel": self.pipeline,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {degree}" for name, degree in self.degrees().items())


def check_layout(
    shape: Mapping[str, Any],
    world: int,
    work: Work,
    data: DataParallelOptions,
    model: ModelParallelOptions | None = None,
) -> Layout:
    """The layout that the options ask for, with what they leave open filled in.

    Args:
        shape: The model's configuration by Hugging Face's names, vocab_size included; empty: data parallelism alone.
        world: Processes.
        work: The batch, and what the precision wants.
        data: Degrees of data parallelism.
        model: Degrees of model parallelism; None: 1.

    Raises:
        ValueError: it cannot be; with the reason, and the nearest layout that can.
    """
    model = model or ModelParallelOptions()
    tensor, pipeline = model.tensor_parallel, model.pipeline_parallel
    replicate, shard = _fill(world, tensor * pipeline, data.data_parallel_replicate, data.data_parallel_shard)
    wanted = Layout(replicate, shard, tensor, pipeline)
    if wanted.world == world and not (reason := _fault(wanted, shape, work)):
        return _with_batch(wanted, work)
    if wanted.world != world:
        reason = f"{wanted} makes {wanted.world} processes, and there {'is' if world == 1 else 'are'} {world}"
    near = _nearest(wanted, shape, world, work)
    processes = "" if near.world == world else f" on {near.world} process{'es' if near.world > 1 else ''}"
    raise ValueError(f"{reason}; the nearest layout that is possible{processes}: {near}")


def _fill(world: int, model: int, replicate: int, shard: int) -> tuple[int, int]:
    """The degrees of data parallelism with zeros replaced by what is left of the world, one at least."""
    if shard == 0:
        replicate = replicate or 1
        shard = max(1, world // (model * replicate))
    return replicate or max(1, world // (model * shard)), shard


def _with_batch(layout: Layout, work: Work) -> Layout:
    local = work.global_batch // layout.data
    micro = min(work.micro_batch, local)
    return replace(layout, micro_batch=micro, micro_batches=local // micro, schedule=work.schedule)


def _fault(layout: Layout, shape: Mapping[str, Any], work: Work) -> str:
    """Why the layout cannot be, or ""."""
    if not shape and layout.tensor * layout.pipeline > 1:
        return "a model of unknown shape cannot be cut"
    return _batch_fault(layout, work) or _tensor_fault(layout.tensor, shape, work) or _stage_fault(layout, shape, work)


def _batch_fault(layout: Layout, work: Work) -> str:
    local, rest = divmod(work.global_batch, layout.data)
    if rest:
        return f"global_batch_size {work.global_batch} does not divide over {layout.data} data-parallel ranks"
    micro = min(work.micro_batch, local)
    if local % micro:
        return (
            f"a data-parallel rank's {local} sequences (global_batch_size {work.global_batch} over {layout.data}) are "
            f"no multiple of micro_batch_size {micro}"
        )
    return ""


def _tensor_fault(degree: int, shape: Mapping[str, Any], work: Work) -> str:
    if degree == 1:
        return ""
    heads = shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads") or heads
    if kv_heads < degree:
        return f"tensor_parallel {degree} is above the model's {kv_heads} key-value heads"
    sizes = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "intermediate_size": shape["intermediate_size"],
        "vocab_size": shape["vocab_size"],
    }
    for name, size in sizes.items():
        if size % degree:
            return f"tensor_parallel {degree} does not divide {name} {size}"
    head = shape.get("head_dim") or shape["hidden_size"] // heads
    products = {
        "intermediate_size": shape["intermediate_size"],
        "num_attention_heads x head_dim": heads * head,
        "num_key_value_heads x head_dim": kv_heads * head,
    }
    for name, size in products.items():
        if size >= work.minimum_features and size // degree % work.alignment:
            return (
                f"fp8 takes dimensions in multiples of {work.alignment}, and tensor_parallel {degree} leaves a rank "
                f"{size // degree} of {name} {size}"
            )
    return ""


def _stage_fault(layout: Layout, shape: Mapping[str, Any], work: Work) -> str:
    if layout.pipeline == 1:
        return ""
    layers = shape["num_hidden_layers"]
    if layers < layout.pipeline:
        return f"pipeline_parallel {layout.pipeline} is above the model's {layers} blocks"
    count = _with_batch(layout, work).micro_batches
    if work.schedule == "1f1b" and count < layout.pipeline:
        return (
            f"pipeline_schedule 1f1b wants as many micro-batches as stages, and a rank has {count} for "
            f"{layout.pipeline} (use a smaller micro_batch_size, or gpipe)"
        )
    return ""


def _nearest(wanted: Layout, shape: Mapping[str, Any], world: int, work: Work) -> Layout:
    """The possible layout that is nearest, on as many processes as there are or else on fewer."""
    for count in range(world, 0, -1):
        found = [layout for layout in _layouts(count) if not _fault(layout, shape, work)]
        if found:
            return min(found, key=lambda layout: _distance(layout, wanted))
    raise AssertionError("one process is always possible")


def _layouts(world: int) -> Iterator[Layout]:
    for pipeline in _divisors(world):
        for tensor in _divisors(world // pipeline):
            for replicate in _divisors(rest := world // pipeline // tensor):
                yield Layout(replicate, rest // replicate, tensor, pipeline)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _distance(one: Layout, other: Layout) -> float:
    """Doublings between two layouts, summed over the degrees."""
    pairs = zip(one.degrees().values(), other.degrees().values(), strict=True)
    return sum(abs(math.log2(left / right)) for left, right in pairs)
