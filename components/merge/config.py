"""Configuration of merge."""

from typing import Literal

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import InputURI, NonNegativeInt, OutputURI, PositiveFloat


class Config(Base):
    """Merge an adapter into its base model, tensor by tensor, and prove that the merged model computes the same."""

    model: InputURI
    """Model artifact that the adapter was trained on."""
    adapter: InputURI
    """Adapter artifact: LoRA, rank-stabilised LoRA or DoRA."""
    output: OutputURI
    """Where the merged model is written."""
    check_base: bool = True
    """Refuse an adapter that was trained on another base than `model` (by the manifest's SHA-256)."""
    tied_embeddings: Literal["refuse", "untie"] = "refuse"
    """What to do when the model ties lm_head to embed_tokens and the adapter changes one of them alone:
    refuse, or write both tensors and untie them in config.json."""
    max_shard_bytes: NonNegativeInt = 0
    """Largest weight file in bytes, one larger tensor excepted; 0 keeps the base's files and index."""
    tolerance: PositiveFloat = 2.0
    """Largest logit difference in the proof, as a multiple of the difference that rounding noise on the merged weights
    makes on this model; sound merges were seen between 0.5 and 1.3."""
