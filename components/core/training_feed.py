"""Which micro-batches a rank takes: of each optimizer step, and of a validation.

Pure arithmetic over core/data's order; what is done with them is the loop's. Left out on purpose: reading ahead,
because a memory map is faster than a forward pass.
"""

import math
from collections.abc import Iterator

from crosstrain.components.core.batch import Batch, blank, make_batch
from crosstrain.components.core.data import BatchPlan
from crosstrain.components.core.parallel.engine import Engine
from crosstrain.components.core.parallel.layout import Layout
from crosstrain.components.core.parallel.world import World
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.core.training_state import Dataset


class Feed:
    """The batches of one rank."""

    def __init__(
        self,
        dataset: Dataset,
        validation: Dataset | None,
        options: TrainingOptions,
        engine: Engine,
        world: World,
        layout: Layout,
        token_multiple: int,
    ) -> None:
        """Deal the data to the ranks.

        Raises:
            ValueError: too few samples.
        """
        self._dataset, self._validation, self._options = dataset, validation, options
        self._engine, self._world, self._layout, self._token_multiple = engine, world, layout, token_multiple
        self._plan = BatchPlan(
            len(dataset), options.global_batch_size, options.seed, engine.data_rank, engine.data_size
        )

    def step(self, position: int) -> tuple[list[Batch], int, int]:
        """The micro-batches of this rank in a global batch, and the labels and tokens of the whole of it.

        Args:
            position: The global batch, counted from 0 in the order of the data.
        """
        batches = list(self._batches(self._dataset, self._plan.indices(position).tolist()))
        mine = [sum(batch.labels for batch in batches), sum(batch.tokens for batch in batches)]
        labels, tokens = self._world.sum(mine if self._engine.counts else [0, 0])
        return batches, int(labels), int(tokens)

    def validation(self) -> Iterator[Batch]:
        """The validation micro-batches of this rank: on all ranks as many, filled up with ones that reach no loss."""
        if not self._validation:
            return
        count = self._options.validation_samples(len(self._validation))
        mine = list(range(self._engine.data_rank, count, self._engine.data_size))
        if self._world.size > 1:
            unit = self._layout.micro_batch * self._engine.rounds
            wanted = -(-math.ceil(count / self._engine.data_size) // unit) * unit
            mine += [-1] * (wanted - len(mine))
        yield from self._batches(self._validation, mine)

    def _batches(self, dataset: Dataset, indices: list[int]) -> Iterator[Batch]:
        """Micro-batches of some samples; -1 stands for one that reaches no loss."""
        size = self._layout.micro_batch
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            samples = [dataset[index] if index >= 0 else blank(dataset[0]) for index in chosen]
            yield make_batch(samples, self._token_multiple)
