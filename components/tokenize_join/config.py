"""Options of tokenize_join."""

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import InputURI, InputURIs, OutputURI, Workers


class Config(BaseConfig):
    """Make tokens of what all partitions of a planned tokenizing did: the one manifest, and nothing copied.

    The manifest is, but for the place it names, that of one tokenize step with the plan's options. The parts stay
    beside the plan.
    """

    corpus: InputURI
    """Corpus artifact that was planned."""
    plan: InputURI
    """Plan of the work, made by tokenize_plan."""
    partitions: InputURIs
    """Receipts of all partitions."""
    output: OutputURI
    """Where to write the manifest of the tokens."""
    workers: Workers = 0
    """Processes that make up for parts that were lost; 0: as many as there are CPUs, and such parts."""
