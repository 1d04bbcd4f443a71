"""Options of how a model is laid out over processes; torch-free, because help and faces read them.

None of them says what the work is: a run may go on in another layout, whose sums differ in their last bits only.
"""

from typing import Annotated, Literal

from pydantic import Field

from crosstrain.components.core.config import RUNTIME, Config

Degree = Annotated[int, Field(ge=1, json_schema_extra={"role": RUNTIME})]
FreeDegree = Annotated[int, Field(ge=0, json_schema_extra={"role": RUNTIME})]
Schedule = Literal["1f1b", "gpipe"]
Recomputation = Literal["none", "selective", "full"]


class DataParallelOptions(Config):
    """Data parallelism: every rank takes its own part of the global batch."""

    data_parallel_shard: FreeDegree = 0
    """Data-parallel ranks that share one copy of parameters, gradients and optimizer state (FSDP2); 0: what the
    other degrees leave of the processes."""
    data_parallel_replicate: FreeDegree = 1
    """Such copies (HSDP); 0: what the other degrees leave of the processes."""
    activation_checkpointing: Annotated[Recomputation, Field(json_schema_extra={"role": RUNTIME})] = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but the matrix products of each
    block (selective), or whole blocks (full)."""


class ModelParallelOptions(Config):
    """Tensor and pipeline parallelism: one copy of the model over several ranks."""

    tensor_parallel: Degree = 1
    """Ranks that each matrix product is cut over; must divide the attention and key-value heads, the MLP's size
    and the vocabulary."""
    pipeline_parallel: Degree = 1
    """Ranks that the blocks are dealt to, one stage each; needs micro-batches of one length, as shards give."""
    pipeline_schedule: Annotated[Schedule, Field(json_schema_extra={"role": RUNTIME})] = "1f1b"
    """Order of the stages' passes: 1f1b holds fewer activations and wants as many micro-batches as stages."""
