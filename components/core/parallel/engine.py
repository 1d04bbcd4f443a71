"""What the training loop asks of a model, however it is laid out: gradients, their norm, losses, and the weights back.

`Engine` is a model whole in one process; `Spread` is one over several, by FSDP2 or HSDP and tensor parallelism
(pipeline parallelism: core/parallel/pipeline). The loop counts labels over all ranks and divides by them, so that a
loss does not depend on the layout; sums in another order are all that differs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from crosstrain.components.core.batch import Batch, loss_sum
from crosstrain.components.core.optimization import make_optimizer, undecayed
from crosstrain.components.core.parallel import sharding
from crosstrain.components.core.parallel.layout import Layout
from crosstrain.components.core.parallel.tensor_parallel import cut
from crosstrain.components.core.parallel.world import World
from crosstrain.components.core.training_config import TrainingOptions

Autocast = Callable[..., AbstractContextManager[object]]
"""`Precision.autocast`."""


class Engine:
    """A model in this process alone."""

    data_rank, data_size = 0, 1
    """Which part of the global batch is this rank's, and of how many."""
    counts = True
    """Whether this rank's losses and labels count: one rank of each part says so."""
    rounds = 1
    """Micro-batches that an evaluation takes in multiples of."""

    def __init__(self, model: nn.Module, options: TrainingOptions, device: torch.device) -> None:
        self.model, self.options, self.device = model, options, device
        self.loss = torch.compile(loss_sum, dynamic=False) if options.compile else loss_sum
        self.parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        """What is trained, by name; in a pipeline this stage's."""
        self.optimizer = make_optimizer(self.parameters, options, undecayed(model))

    def backward(self, batches: Sequence[Batch], labels: float, autocast: Autocast) -> torch.Tensor:
        """Gradients of the summed losses over `labels`; this rank's part of that mean loss, []."""
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            with autocast(first_micro_batch=index == 0):
                loss = self.loss(self.model, *batch.tensors(self.device)) / labels
            loss.backward()
            total += loss.detach()
        return total

    def clip(self, limit: float) -> torch.Tensor:
        """Scale the gradients down to a global norm of `limit` at most; the norm before, []."""
        return nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)

    def evaluate(self, batches: Iterator[Batch], autocast: Autocast) -> tuple[float, int]:
        """The sum of the losses over some batches, and the number of their labels; this rank's part."""
        total, labels = 0.0, 0
        self.model.eval()
        with torch.no_grad(), autocast():
            for batch in batches:
                total += loss_sum(self.model, *batch.tensors(self.device)).item()
                labels += batch.labels
        return total, labels

    def weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What is trained, whole, one parameter at a time: its tensor on rank 0, None elsewhere. All ranks iterate."""
        yield from ((name, item.detach()) for name, item in self.parameters.items())


class Spread(Engine):
    """A model over several processes, by data and tensor parallelism."""

    def __init__(
        self, model: nn.Module, options: TrainingOptions, device: torch.device, world: World, layout: Layout
    ) -> None:
        """Place the model's parameters; it is used through this object from here on.

        Args:
            model: Whole, the same on every rank, converted to its precision; may lie on the CPU.
            options: How it is trained.
            device: Where this rank computes.
            world: The processes.
            layout: As `check_layout` gave it for them.
        """
        self.world, self.layout = world, layout
        trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self.shapes = {name: item.shape for name, item in trained.items()}
        self.dtypes = {name: item.dtype for name, item in trained.items()}
        self.mesh = sharding.make_mesh(layout, device.type)
        self.at = dict(zip(cast(Any, self.mesh.mesh_dim_names), cast(Any, self.mesh.get_coordinate()), strict=True))
        self.data_rank = self.at[sharding.REPLICATE] * layout.shard + self.at[sharding.SHARD]
        self.data_size = layout.data
        self.counts = self.at[sharding.TENSOR] == 0 and self.at[sharding.PIPELINE] == layout.pipeline - 1
        spared = undecayed(model)
        self.model, self.options, self.device, self.loss = model, options, device, loss_sum
        root = self._place(model)
        root.to(device)
        self.parameters = {name: item for name, item in self._named() if item.requires_grad}
        self.optimizer = make_optimizer(self.parameters, options, spared)

    def _place(self, model: Any) -> nn.Module:
        """Cut and shard in place; the module to call."""
        blocks = list(model.get_decoder().layers)
        if self.layout.tensor > 1:
            cut(model, self.mesh[sharding.TENSOR])
        self._compile(blocks)
        sharding.shard(model, blocks, self.mesh, self.layout)
        return cast(nn.Module, model)

    def _compile(self, blocks: list[nn.Module]) -> None:
        if self.options.compile:
            for block in blocks:
                block.compile(dynamic=False)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def backward(self, batches: Sequence[Batch], labels: float, autocast: Autocast) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with autocast():
                loss = self.loss(self.model, *batch.tensors(self.device)) / labels
            (loss * self.data_size).backward()  # FSDP takes the mean over the ranks, and the sum is meant
            total += loss.detach()
        return total

    def clip(self, limit: float) -> torch.Tensor:
        norm = whole(nn.utils.get_total_norm(self._counted_gradients()))
        norm = self._over_stages(norm.to(self.device))
        nn.utils.clip_grads_with_norm_(list(self.parameters.values()), limit, norm)
        return norm

    def _counted_gradients(self) -> list[torch.Tensor]:
        return [item.grad for item in self.parameters.values() if item.grad is not None]

    def _over_stages(self, norm: torch.Tensor) -> torch.Tensor:
        return norm

    def weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name in self.shapes:
            yield name, self._gather(self.parameters.get(name), name)

    def _gather(self, item: torch.Tensor | None, name: str) -> torch.Tensor | None:
        assert item is not None
        full = whole(item.detach())
        return full.cpu() if self.world.first else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's full value; of a DTensor all ranks of its mesh must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_engine(
    model: nn.Module, options: TrainingOptions, device: torch.device, world: World, layout: Layout
) -> Engine:
    """The engine for a layout."""
    if world.size == 1:
        return Engine(model, options, device)
    assert layout.world == world.size, f"{layout} for {world.size} processes"
    if layout.pipeline > 1:
        from crosstrain.components.core.parallel.pipeline import Pipelined

        return Pipelined(model, options, device, world, layout)
    return Spread(model, options, device, world, layout)
