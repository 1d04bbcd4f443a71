"""One partition of a corpus, for many machines that share an output: the command line of `run_partition`.

    python -m crosstrain.components.tokenize.partition 0/4 --corpus … --tokenizer-uri … --output …

When all partitions are done, `python -m crosstrain.components.tokenize` with the same options joins them: it takes
over the finished units and writes the one manifest.
"""

import logging
import sys
from collections.abc import Sequence

from crosstrain.components.core import telemetry
from crosstrain.components.core.config import parse_arguments
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.program import run_partition

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Do one partition: status 0, or 1 with one `error:` line."""
    telemetry.start("tokenize")
    try:
        name, *options = argv or [""]
        partition, slash, partitions = name.partition("/")
        if not (slash and partition.isdecimal() and partitions.isdecimal()):
            raise ValueError(f"{name!r} is no partition; give one as 0/4, then the options of tokenize")
        config = parse_arguments(Config, "python -m crosstrain.components.tokenize.partition", options)
        done = run_partition(config, int(partition), int(partitions))
    except (ValueError, OSError) as error:
        log.debug("traceback", exc_info=True)
        sys.exit(f"error: {error}")
    log.info("tokenize: %d units of partition %s are finished at %s", done.units, name, config.output)


if __name__ == "__main__":
    main(sys.argv[1:])
