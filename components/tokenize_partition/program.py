"""One partition of a planned tokenizing: parts beside the plan, and a receipt."""

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import PartitionFacts
from crosstrain.components.core.step import Result
from crosstrain.components.tokenize.planned import planned_config
from crosstrain.components.tokenize.program import run_partition
from crosstrain.components.tokenize_partition.config import Config

COMPONENT = "tokenize_partition"


def run(config: Config) -> Result:
    """Do the units of one partition that are not finished yet.

    Raises:
        FileNotFoundError: corpus or plan is not there.
        ValueError: there is no such partition, the plan is another corpus's, or a document is invalid.
    """
    inputs = {name: Artifact.open(uri) for name, uri in config.artifacts().items()}
    plan = Artifact.open(config.plan, "plan")
    partitions = plan.facts.partitions
    done = run_partition(planned_config(plan, config.corpus, config.workers), config.partition, partitions)
    with ArtifactWriter(config.output) as out:
        facts = PartitionFacts(
            partition=config.partition,
            partitions=partitions,
            units=done.units,
            documents=done.documents,
            tokens=done.tokens,
        )
        artifact = out.commit(COMPONENT, facts, config.options(), inputs)
    return Result(artifact, {name: float(value) for name, value in done._asdict().items()})
