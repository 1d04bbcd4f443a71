"""A model's parameters placed over the ranks of one mesh: tensor parallelism first, FSDP2 or HSDP around it.

The mesh has one dimension for each kind of parallelism, of size 1 where there is none. Blocks are FSDP's units; what
is left (embedding, last norm, lm_head) is one more. Parameters, gradients and their sums over ranks are fp32.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from crosstrain.components.core.parallel.layout import Layout

PIPELINE, REPLICATE, SHARD, TENSOR = "pipeline", "replicate", "shard", "tensor"


_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "_scaled_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    )
]  # fmt: skip
"""Operators whose results selective recomputation keeps."""


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh [pipeline, replicate, shard, tensor] over all processes; ranks next to one another share a tensor."""
    shape = (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR))


def shard(root: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, layout: Layout) -> None:
    """Shard a module in place over the data-parallel ranks.

    Args:
        root: What is called forward on.
        blocks: Its decoder blocks: gathered one at a time.
        mesh: As `make_mesh` gives it.
        layout: Degrees; without data parallelism nothing is done.
    """
    if layout.data == 1:
        return
    data = mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]
    keep = layout.pipeline > 1  # a stage runs many times between two updates
    for block in blocks:
        fully_shard(block, mesh=data, reshard_after_forward=not keep)
    fully_shard(root, mesh=data, reshard_after_forward=False)


def recompute(model: Any, how: str) -> None:
    """Have a Hugging Face model's blocks compute again in backward what they would keep: none, selective or full."""
    if how == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renamed it, and keeps this name until 6
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
