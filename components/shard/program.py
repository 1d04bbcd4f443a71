"""Token documents to training shards: split by hash, shuffle by seed, pack, and write one manifest.

Nothing is lost: the ids of all shards are the ids of all documents. Samples are not stored; a sample is a range of
ids, which core/data.py reads. A shard is the unit of work: workers write them side by side, and those that an
interrupted run stored are taken over.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

from crosstrain.components.core import telemetry
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import ShardsFacts, Split
from crosstrain.components.core.step import Result
from crosstrain.components.core.unit_records import UnitRecords, work_key
from crosstrain.components.core.workers import count_workers, share_work
from crosstrain.components.shard.config import Config
from crosstrain.components.shard.packing import Plan, plan_shards, write_shard
from crosstrain.components.shard.splitting import Documents, Members, fetch_parts, split

log = logging.getLogger(__name__)


def run(config: Config) -> Result:
    """Make shards of a tokens artifact.

    Raises:
        FileNotFoundError: no tokens artifact there.
        ValueError: no document, fewer tokens than one sequence, or a split without documents.
        ChildProcessError: a worker died.
    """
    tokens = Artifact.open(config.tokens, "tokens")
    facts = tokens.facts
    if not facts.documents:
        raise ValueError(f"{config.tokens}: an empty corpus, no document in it; tokenize one that has text")
    _check_size(config, "the whole corpus", facts.tokens)
    with ArtifactWriter(config.output) as out:
        documents = Documents(fetch_parts(tokens))
        members = split(documents, config.validation_fraction, config.seed, out.staging)
        _check_size(config, "the train split", members["train"].tokens)
        plans = {name: list(plan_shards(name, members[name], documents, config.shard_tokens)) for name in members}
        records = UnitRecords(out, work_key({"options": config.options(), "tokens": tokens.manifest.sha256}))
        began = time.monotonic()
        made = _make(config, plans, members, documents, out, records)
        seconds = time.monotonic() - began
        splits = {name: _facts(config, plans[name], members[name]) for name in members}
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
        records.clear()
    return Result(artifact, _metrics(splits, made / max(seconds, 1e-9)))


def _check_size(config: Config, what: str, tokens: int) -> None:
    if tokens < config.sequence_length:
        raise ValueError(
            f"{config.tokens}: {what} has {tokens} tokens, fewer than one sequence of {config.sequence_length}; "
            "give more data or a smaller sequence_length"
        )


def _make(
    config: Config,
    plans: dict[str, list[Plan]],
    members: dict[str, Members],
    documents: Documents,
    out: ArtifactWriter,
    records: UnitRecords,
) -> int:
    """Write and store the shards that no earlier run has stored; their tokens."""
    wanted = [(name, plan) for name, some in plans.items() for plan in some]
    there = records.load({plan.stem for _, plan in wanted})
    missing = [(name, plan) for name, plan in wanted if plan.stem not in there]
    if there:
        log.info("%d of %d shards were finished before", len(there), len(wanted))
    done = 0
    for number, plan in enumerate(_written(config, missing, members, documents, out.staging), start=len(there) + 1):
        target = out.staging / plan.stem
        files = [out.add(target.with_name(plan.stem + suffix), plan.stem + suffix) for suffix in (".bin", ".idx")]
        records.save(plan.stem, plan.tokens, files)
        done += plan.tokens
        log.info("shard: %s, %d of %d shards, %d tokens", plan.stem, number, len(wanted), plan.tokens)
        telemetry.emit("progress", shards=number, tokens=plan.tokens)
    return done


def _written(
    config: Config, todo: list[tuple[str, Plan]], members: dict[str, Members], documents: Documents, folder: Path
) -> Iterator[Plan]:
    """Shards as their pairs appear in a folder, in any order."""
    workers = count_workers(config.workers, len(todo))
    if workers > 1:
        yield from share_work(workers, _start_worker, (documents.stems, members, folder), _write, todo)
        return
    for name, plan in todo:
        write_shard(plan, members[name], documents, folder / plan.stem)
        yield plan


_work: tuple[Documents, dict[str, Members], Path]


def _start_worker(stems: list[Path], members: dict[str, Members], folder: Path) -> None:
    global _work
    _work = Documents(stems), members, folder


def _write(unit: tuple[str, Plan]) -> Plan:
    documents, members, folder = _work
    name, plan = unit
    write_shard(plan, members[name], documents, folder / plan.stem)
    return plan


def _facts(config: Config, plans: list[Plan], members: Members) -> Split:
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
