"""Options of tokenize_partition."""

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import InputURI, NonNegativeInt, OutputURI, Workers


class Config(BaseConfig):
    """Do one partition of a planned tokenizing.

    The parts go beside the plan, where all partitions write. What a killed partition finished is not done again.
    """

    corpus: InputURI
    """Corpus artifact that was planned."""
    plan: InputURI
    """Plan of the work, made by tokenize_plan."""
    output: OutputURI
    """Where to write the receipt that this partition is done."""
    partition: NonNegativeInt
    """Which one: from 0 to the plan's partitions - 1."""
    workers: Workers = 0
    """Processes that tokenize; 0: as many as there are CPUs, and units. The tokens do not depend on it."""
