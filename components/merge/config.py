"""Configuration of merge."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import InputURI, InputURIs, NonNegativeInt, OutputURI, PositiveFloat

Weight = Annotated[float, Field(allow_inf_nan=False)]


class Config(Base):
    """Merge an adapter into its base model, tensor by tensor, and prove that the merged model computes the same."""

    model: InputURI
    """Model artifact that the adapter was trained on."""
    adapter: InputURI
    """Adapter artifact: LoRA, rank-stabilised LoRA or DoRA."""
    more_adapters: InputURIs = ()
    """Further adapters of the same base, LoRA or rank-stabilised LoRA: the updates are summed, each with its weight,
    and rounded once. The same as peft's add_weighted_adapter with combination_type cat."""
    output: OutputURI
    """Where the merged model is written."""
    weights: tuple[Weight, ...] = ()
    """Weight of `adapter` and of each of `more_adapters`, in this order, negative ones subtract; empty: 1 each. A
    DoRA adapter, and one that replaces whole tensors, takes no other weight than 1."""
    check_base: bool = True
    """Refuse an adapter that was trained on another base than `model` (by the manifest's SHA-256)."""
    tied_embeddings: Literal["refuse", "untie"] = "refuse"
    """What to do when the model ties lm_head to embed_tokens and the adapter changes one of them alone:
    refuse, or write both tensors and untie them in config.json."""
    trim_vocabulary: bool = False
    """Leave out the rows of embed_tokens and lm_head past the tokenizer's last id: the padding that training with
    tensor parallelism wants."""
    max_shard_bytes: NonNegativeInt = 0
    """Largest weight file in bytes, one larger tensor excepted; 0 keeps the base's files and index."""
    tolerance: PositiveFloat = 2.0
    """Largest logit difference in the proof, as a multiple of the difference that rounding noise on the merged weights
    makes on this model; sound merges were seen between 0.5 and 1.3."""

    @model_validator(mode="after")
    def _a_weight_each(self) -> Self:
        count = 1 + len(self.more_adapters)
        if self.weights and len(self.weights) != count:
            raise ValueError(f"weights: {len(self.weights)} for {count} adapters; give one each, or none")
        return self
