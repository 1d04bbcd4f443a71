"""Options of shard."""

from typing import Annotated

from pydantic import Field

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import InputURI, OutputURI, PositiveInt, Workers


class Config(BaseConfig):
    """Split token documents into train and validation, shuffle them, and pack them into shards of fixed size.

    A document's split follows from the hash of its text alone: equal texts never part, and no document changes its
    split when others are added.
    """

    tokens: InputURI
    """Tokens artifact, made by tokenize."""
    output: OutputURI
    """Where to write the shards artifact; the shards that an interrupted run finished there are not made again."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens a training sample."""
    seed: int = 0
    """Seed of the shuffle; the split does not depend on it."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.05
    """Share of the documents held out for validation; 0: no validation split."""
    shard_tokens: PositiveInt = 100_000_000
    """Tokens a shard; the last one of a split has what is left. A document that does not fit goes on in the next."""
    workers: Workers = 0
    """Processes that write shards; 0: as many as there are CPUs, and shards. The output does not depend on it."""
