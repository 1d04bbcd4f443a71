"""Tensor parallelism of a Hugging Face Llama: which weight is cut along which dimension.

Attention by heads, the MLP by its inner size, embedding and lm_head by the vocabulary; activations between the blocks
are whole on every rank, and so are the norms. Every parameter becomes a DTensor, so that gradient norms and the
optimizer see one kind. Left out on purpose: sequence parallelism of the norms, because transformers takes the
sequence's length from the embedding's output.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)


class WholeParallel(ParallelStyle):
    """A module that every rank computes whole, with its parameters as replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def place(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, item in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(item.data, mesh, [Replicate()])
                part.register_parameter(key, nn.Parameter(whole, requires_grad=item.requires_grad))

        def take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(item, mesh, [Replicate()]) for item in inputs)

        def give(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, place, take, give)


def _plan(layers: int) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.norm": WholeParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(layers):
        block = f"model.layers.{index}"
        plan |= {f"{block}.{name}": WholeParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan |= {f"{block}.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"{block}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return plan


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a LlamaForCausalLM in place over the ranks of a one-dimensional mesh; tied weights stay tied."""
    llama: Any = model
    tied = llama.lm_head.weight is llama.model.embed_tokens.weight
    parallelize_module(model, mesh, _plan(len(llama.model.layers)))
    if tied:
        llama.lm_head.weight = llama.model.embed_tokens.weight
