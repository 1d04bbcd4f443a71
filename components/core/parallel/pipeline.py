"""Pipeline parallelism of a Hugging Face Llama: the blocks dealt to stages, one a rank.

A stage is the very LlamaForCausalLM with the blocks of the others taken out, so that its parameters keep their names
and transformers' own forward runs it. The pipeline's micro-batches are those of gradient accumulation. A tied
embedding is held twice, by the first and the last stage: each step the two add their gradients, so that the copies
stay equal to the bit; norm and checkpoint count it once.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn import functional

from crosstrain.components.core.batch import Batch
from crosstrain.components.core.data import IGNORE
from crosstrain.components.core.parallel import sharding
from crosstrain.components.core.parallel.engine import Autocast, Spread, whole
from crosstrain.components.core.parallel.tensor_parallel import cut

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def deal(layers: int, stages: int) -> list[range]:
    """The blocks of each stage: as many to each, and what is left over one by one to the first."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


class _Blocks(nn.ModuleDict):
    """Some of a model's blocks under their own numbers, walked through as transformers walks its list."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, slice) else super().__getitem__(key)


class Stage(nn.Module):
    """One stage: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, model: Any, index: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == stages - 1
        mine = deal(len(model.model.layers), stages)[index]
        model.model.layers = _Blocks({str(number): model.model.layers[number] for number in mine})
        if not self.is_first:
            model.model.embed_tokens = None
        if not self.is_last:
            model.model.norm, model.lm_head = nn.Identity(), None
        self.causal = model
        self.autocast: Autocast | None = None

    def forward(self, values: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, L, vocabulary] of the last stage, else hidden states [B, L, hidden]."""
        given = {"input_ids" if self.is_first else "inputs_embeds": values}
        assert self.autocast is not None
        with self.autocast():
            if self.is_last:
                logits: torch.Tensor = self.causal(**given, position_ids=position_ids, use_cache=False).logits
                return logits.float()
            hidden: torch.Tensor = self.causal.model(
                **given, position_ids=position_ids, use_cache=False
            ).last_hidden_state
            return hidden


def _loss(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class Pipelined(Spread):
    """A model over several processes in stages, each of them perhaps spread further."""

    def _place(self, model: Any) -> nn.Module:
        layout, index = self.layout, self.at[sharding.PIPELINE]
        self.rounds = layout.micro_batches
        self.dealt = deal(len(model.model.layers), layout.pipeline)
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight
        if layout.tensor > 1:
            cut(model, self.mesh[sharding.TENSOR])
        if self.tied and index > 0:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        self.stage = Stage(model, index, layout.pipeline)
        blocks = list(model.model.layers.values())
        self._compile(blocks)
        sharding.shard(self.stage, blocks, self.mesh, layout)
        self.stage.to(self.device)
        columns = self.mesh.mesh.flatten(1).T.tolist()
        self.column = self.mesh[sharding.PIPELINE].get_group()
        self.ends = self.column
        for column in columns:  # every rank makes every group
            group = distributed.new_group([column[0], column[-1]])
            if self.world.rank in (column[0], column[-1]):
                self.ends = group
        pipeline = PipelineStage(self.stage, index, layout.pipeline, self.device, group=self.column)
        self.schedule = _SCHEDULES[layout.schedule](
            pipeline, n_microbatches=layout.micro_batches, loss_fn=_loss, scale_grads=False
        )
        self.validation = ScheduleGPipe(
            PipelineStage(self.stage, index, layout.pipeline, self.device, group=self.column),
            n_microbatches=layout.micro_batches,
            loss_fn=_loss,
            scale_grads=False,
        )
        return self.stage

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters by their names in the whole model; the copy of a tied embedding has its name."""
        for name, item in self.model.named_parameters():
            yield EMBEDDING if self.tied and name == HEAD else name, item

    def backward(self, batches: Sequence[Batch], labels: float, autocast: Autocast) -> torch.Tensor:
        self.stage.autocast = autocast
        losses = self._run(self.schedule.step, batches, self.data_size / labels, return_outputs=False)
        if self.tied and (self.stage.is_first or self.stage.is_last):
            self._add_tied(self.parameters[EMBEDDING])
        return losses / self.data_size

    def _add_tied(self, copy: torch.Tensor) -> None:
        """Give both ends the sum of their gradients of the tied embedding."""
        assert copy.grad is not None
        if isinstance(copy, DTensor):
            copy.grad = cast(DTensor, copy.grad).redistribute(copy.device_mesh, copy.placements)
        distributed.all_reduce(_local(copy.grad), group=self.ends)

    def _run(self, call: Any, batches: Sequence[Batch], scale: float, **kwargs: Any) -> torch.Tensor:
        """Send micro-batches of one shape through the pipeline; the last stage's summed losses, 0 elsewhere."""
        ids, positions, targets = (
            torch.cat(items) for items in zip(*(batch.tensors(self.device) for batch in batches), strict=True)
        )
        losses: list[torch.Tensor] = []
        inputs = (ids,) if self.stage.is_first else ()
        if self.stage.is_last:
            kwargs |= {"target": targets, "losses": losses}
        call(*inputs, position_ids=positions, loss_kwargs={"scale": scale}, **kwargs)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    def _counted_gradients(self) -> list[torch.Tensor]:
        copy = self.tied and not self.stage.is_first
        return [
            item.grad
            for name, item in self.parameters.items()
            if item.grad is not None and not (copy and name == EMBEDDING)
        ]

    def _over_stages(self, norm: torch.Tensor) -> torch.Tensor:
        squares = norm.square()
        distributed.all_reduce(squares, group=self.column)
        return squares.sqrt()

    def evaluate(self, batches: Iterator[Batch], autocast: Autocast) -> tuple[float, int]:
        total, labels = 0.0, 0
        self.stage.eval()
        self.stage.autocast = autocast
        while chunk := list(islice(batches, self.rounds)):
            with torch.no_grad():
                total += self._run(self.validation.eval, chunk, 1.0).item()
            labels += sum(batch.labels for batch in chunk)
        return total, labels

    def _gather(self, item: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """One parameter from the stage that holds it to rank 0, by the first rank of that stage."""
        stage = self._holder(name)
        sender = int(self.mesh.mesh[stage, 0, 0, 0])
        full = whole(item.detach()).cpu() if item is not None and self.at[sharding.PIPELINE] == stage else None
        if sender == 0:
            return full if self.world.first else None
        if self.world.rank == sender:
            assert full is not None
            distributed.send(full.contiguous(), dst=0, group=self.world.talk)
        if not self.world.first:
            return None
        received = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        distributed.recv(received, src=sender, group=self.world.talk)
        return received

    def _holder(self, name: str) -> int:
        """The stage whose copy of a parameter is saved."""
        if name.startswith("model.layers."):
            number = int(name.split(".")[2])
            return next(stage for stage, mine in enumerate(self.dealt) if number in mine)
        return 0 if name == EMBEDDING else self.layout.pipeline - 1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
