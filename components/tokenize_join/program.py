"""The end of a planned tokenizing: one manifest of the parts that all partitions made."""

import logging

from crosstrain.components.core.artifact import Artifact, commit_manifest
from crosstrain.components.core.manifest import Manifest
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import open_store
from crosstrain.components.tokenize import program as tokenize
from crosstrain.components.tokenize.config import Config as TokenizeConfig
from crosstrain.components.tokenize.planned import planned_config
from crosstrain.components.tokenize_join.config import Config

log = logging.getLogger(__name__)


def run(config: Config) -> Result:
    """Join the partitions.

    Raises:
        FileNotFoundError: corpus, plan or a receipt is not there.
        ValueError: a partition has no receipt of this plan, or no document has any text.
    """
    plan = Artifact.open(config.plan, "plan")
    check_receipts(plan, [Artifact.open(uri, "partition") for uri in config.partitions])
    store = open_store(config.output)
    store.check_writable()
    work = planned_config(plan, config.corpus, config.workers)
    tokens = _finished(work, plan) or tokenize.run(work).artifact
    manifest = Manifest(
        component=tokens.manifest.component,
        facts=tokens.facts,
        files=tokens.manifest.files,
        options=tokens.manifest.options,
        inputs=tokens.manifest.inputs,
        base=tokens.uri,
    )
    facts = tokens.facts
    metrics = {
        "partitions": plan.facts.partitions,
        "documents": facts.documents,
        "tokens": facts.tokens,
        "duplicates": facts.duplicates,
        "quarantined": facts.quarantined,
        "bytes_per_token": facts.text_bytes / facts.tokens,
        "vocab_size": facts.tokenizer.vocab_size,
    }
    return Result(commit_manifest(store, manifest), metrics)


def check_receipts(plan: Artifact, receipts: list[Artifact]) -> None:
    """Every partition of this plan has said that it is done, or a ValueError names the first that has not."""
    done = set()
    for receipt in receipts:
        if receipt.manifest.inputs["plan"] != plan.manifest.source():
            raise ValueError(f"{receipt.uri}: the receipt of another plan than {plan.uri}; give those of this plan")
        done.add(receipt.facts.partition)
    if missing := sorted(set(range(plan.facts.partitions)) - done):
        raise ValueError(
            f"{plan.uri}: partition {missing[0]} of {plan.facts.partitions} has not said that it is done "
            f"({len(missing)} such); run tokenize_partition with it, then join again"
        )


def _finished(work: TokenizeConfig, plan: Artifact) -> Artifact | None:
    """The tokens, if an earlier join finished them."""
    try:
        tokens = Artifact.open(work.output, "tokens")
    except FileNotFoundError:
        return None
    if tokens.manifest.options != work.options() or tokens.manifest.inputs != plan.manifest.inputs:
        return None  # of an earlier plan at this place, and taken away by the next that works there
    log.info("%s: joined before", tokens.uri)
    return tokens
