"""Options of tokenize_plan."""

from crosstrain.components.core.config import OutputURI, PositiveInt
from crosstrain.components.tokenize.config import Work


class Config(Work):
    """Plan the work of tokenizing a corpus, to be done by several partitions at once.

    Takes every option that tokenize takes, for all partitions. A tokenizer that has to be trained is trained here,
    once. The tokens will be those of one tokenize step with the same options, whatever the number of partitions; they
    will lie beside the plan, so that it must stay as long as they are used.
    """

    output: OutputURI
    """Where to write the plan; the partitions write beside it, under `tokens/`."""
    partitions: PositiveInt = 4
    """Partitions that do the work; at most as many as there are units of unit_bytes."""
