"""The program of compare_arms: read both arms, compare, judge, write.

The artifact holds what the same runs give on any machine. Speed, memory and cost, where they are real, are in the
report and the metrics alone.
"""

import json
import logging

from crosstrain.components.compare_arms.arms import read_pairs
from crosstrain.components.compare_arms.comparison import compare
from crosstrain.components.compare_arms.config import Config
from crosstrain.components.compare_arms.page import render_markdown, render_page, sentences
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.cost import load_prices
from crosstrain.components.core.manifest import ComparisonFacts
from crosstrain.components.core.step import Result

log = logging.getLogger(__name__)

COMPONENT = "compare_arms"


def run(config: Config) -> Result:
    """Compare two arms of a study.

    Raises:
        FileNotFoundError: a run, its log or the price file is not there.
        ValueError: the runs cannot be compared: seeds that do not pair, other data, other options.
    """
    control, candidate = ([Artifact.open(uri) for uri in uris] for uris in (config.control, config.candidate))
    prices = load_prices(config.prices)
    pairs = read_pairs(control, candidate, config.study)
    found = compare(config.study, pairs, config.margin_percent, config.instance_type, prices)
    log.info("%s: %s", found.verdict, " ".join(sentences(found)))
    with ArtifactWriter(config.output) as out:
        with out.create("comparison.json") as path:
            path.write_text(json.dumps(found.record(), indent=2, sort_keys=True, allow_nan=False) + "\n")
        facts = ComparisonFacts(
            study=config.study,
            verdict=found.verdict,
            control=found.labels[0],
            candidate=found.labels[1],
            seeds=tuple(pair.control.seed for pair in pairs),
            metrics=found.metrics(),
        )
        inputs = {name: Artifact.open(uri) for name, uri in config.artifacts().items()}
        artifact = out.commit(COMPONENT, facts, config.options(), inputs)
    metrics = {**found.metrics(), **found.measured()}
    return Result(artifact, metrics, render_page(found, config.options()), render_markdown(found))
