"""Configuration of consolidate."""

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import InputURI, OutputURI, SourceURI


class Config(Base):
    """Put a sharded adapter checkpoint of optimum-neuron together as a standard peft folder, on a CPU.

    finetune_lora does this itself; this is for checkpoints that were trained elsewhere, or by a run that was killed.
    """

    model: InputURI
    """Model artifact that was tuned: the adapter is checked against its shapes."""
    source: SourceURI
    """Prefix or folder that the training wrote to: the last whole checkpoint-<step> in it is taken. Or one of those."""
    output: OutputURI
    """Where the adapter goes."""
    base_name: str = ""
    """Name of the base model for adapter_config.json, such as a hub id; empty: made from the manifest's SHA-256."""
