"""What a plan says to those who do its work: one tokenizer for all, and one place for what they make.

A plan (made by tokenize_plan) holds the options and the tokenizer of one piece of work that several partitions do.
Whoever works by it uses the plan as its tokenizer; the tokens that come of it are those of one tokenize step with the
plan's options, and their manifest does not tell of the plan.
"""

from collections.abc import Mapping

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.manifest import Source
from crosstrain.components.tokenize.config import Config

PARTITIONS = "partitions"
"""The one option of a plan that is none of tokenize's."""


def tokens_prefix(plan: Artifact) -> str:
    """Where all partitions of a plan write, and where the finished tokens lie."""
    return f"{plan.uri}/tokens"


def planned_config(plan: Artifact, corpus: str, workers: int) -> Config:
    """The configuration of tokenize by which a plan's work is done.

    Args:
        plan: The plan.
        corpus: URI of the corpus that was planned.
        workers: Processes that tokenize; 0: as many as there are CPUs.
    """
    options = {name: value for name, value in plan.manifest.options.items() if name != PARTITIONS}
    return Config.decode(
        {**options, "corpus": corpus, "tokenizer": plan.uri, "output": tokens_prefix(plan), "workers": workers},
        where="plan",
    )


def planned_sources(inputs: Mapping[str, Artifact]) -> dict[str, Source]:
    """What tokens are made from, as their manifest says: a plan stands for what it was itself made from.

    Raises:
        ValueError: the plan is another corpus's.
    """
    sources = {name: item.manifest.source() for name, item in inputs.items()}
    plan = inputs.get("tokenizer")
    if plan is None or plan.manifest.kind != "plan":
        return sources
    if plan.manifest.inputs["corpus"] != sources["corpus"]:
        raise ValueError(f"{plan.uri}: the plan of another corpus than {inputs['corpus'].uri}; plan this one")
    return dict(plan.manifest.inputs)
