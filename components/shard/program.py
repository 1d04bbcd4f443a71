"""Token documents to training shards: split by hash, shuffle by seed, pack, and write one manifest.

Nothing is lost: the ids of all shards are the ids of all documents. Samples are not stored; a sample is a range of
ids, which core/data.py reads.
"""

import logging
import time

from crosstrain.components.core import telemetry
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import ShardsFacts, Split
from crosstrain.components.core.step import Result
from crosstrain.components.shard.config import Config
from crosstrain.components.shard.packing import plan_shards, write_shard
from crosstrain.components.shard.splitting import Documents, Members, split

log = logging.getLogger(__name__)


def run(config: Config) -> Result:
    """Make shards of a tokens artifact.

    Raises:
        FileNotFoundError: no tokens artifact there.
        ValueError: no document, fewer tokens than one sequence, or a split without documents.
    """
    tokens = Artifact.open(config.tokens, "tokens")
    facts = tokens.facts
    if not facts.documents:
        raise ValueError(f"{config.tokens}: an empty corpus, no document in it; tokenize one that has text")
    _check_size(config, "the whole corpus", facts.tokens)
    with ArtifactWriter(config.output) as out:
        documents = Documents(tokens)
        members = split(documents, config.validation_fraction, config.seed, out.staging)
        _check_size(config, "the train split", members["train"].tokens)
        began = time.monotonic()
        splits = {name: _pack(config, name, members[name], documents, out) for name in members}
        seconds = time.monotonic() - began
        assert sum(item.tokens for item in splits.values()) == facts.tokens, "ids were lost or doubled"
        for file in tokens.manifest.files:
            if file.path.startswith("tokenizer/"):
                out.add(tokens.fetch(file.path), file.path)
        shards = ShardsFacts(
            tokenizer=facts.tokenizer,
            dtype=facts.dtype,
            sequence_length=config.sequence_length,
            train=splits["train"],
            validation=splits["validation"],
        )
        artifact = out.commit("shard", shards, config.options(), {"tokens": tokens})
    return Result(artifact, _metrics(splits, facts.tokens / max(seconds, 1e-9)))


def _check_size(config: Config, what: str, tokens: int) -> None:
    if tokens < config.sequence_length:
        raise ValueError(
            f"{config.tokens}: {what} has {tokens} tokens, fewer than one sequence of {config.sequence_length}; "
            "give more data or a smaller sequence_length"
        )


def _pack(config: Config, name: str, members: Members, documents: Documents, out: ArtifactWriter) -> Split:
    """Write the shards of one split."""
    plans = list(plan_shards(name, members, documents, config.shard_tokens))
    dtype = documents.pairs[0].dtype
    for number, plan in enumerate(plans, start=1):
        target = out.staging / plan.stem
        write_shard(plan, members, documents, dtype, target)
        for suffix in (".bin", ".idx"):
            out.add(target.with_name(plan.stem + suffix), plan.stem + suffix)
        log.info("shard: %s, %d of %d shards, %d tokens", name, number, len(plans), plan.tokens)
        telemetry.emit("progress", shards=number, tokens=plan.tokens)
    return Split(
        shards=tuple(plan.stem for plan in plans),
        shard_tokens=tuple(plan.tokens for plan in plans),
        continues=tuple(plan.continues for plan in plans),
        documents=len(members),
        tokens=members.tokens,
        samples=-(-members.tokens // config.sequence_length),
    )


def _metrics(splits: dict[str, Split], rate: float) -> dict[str, float]:
    metrics: dict[str, float] = {"tokens_per_second": rate, "shards": sum(len(s.shards) for s in splits.values())}
    for name, item in splits.items():
        metrics |= {
            f"{name}_documents": item.documents,
            f"{name}_tokens": item.tokens,
            f"{name}_samples": item.samples,
        }
    return metrics
