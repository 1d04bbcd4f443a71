"""A corpus too large for one pod: tokenized in partitions at once, joined by one manifest, and sharded.

corpus -> tokenize_plan -> tokenize_partition (as many as wanted, at once) -> tokenize_join -> shard
"""

from kfp import dsl

from crosstrain.components.import_data.component import import_data
from crosstrain.components.preflight.component import preflight
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize_join.component import tokenize_join
from crosstrain.components.tokenize_partition.component import tokenize_partition
from crosstrain.components.tokenize_plan.component import tokenize_plan

AT_ONCE = 16
"""Partitions that run at the same time at most; KFP takes no parameter for it. KFP's local runner runs two."""


@dsl.pipeline(name="tokenize-corpus")
def tokenize_corpus(
    corpus: str,
    vocab_size: int = 32000,
    partitions: int = 16,
    sequence_length: int = 1024,
    seed: int = 0,
    config: dict = {},  # noqa: B006
):
    """Tokenize a large corpus in partitions that run at once, and pack it into training shards.

    The tokens are, byte for byte, those of one tokenize step, whatever the number of partitions. Killed, a run of the
    same folder or a retried pod does only what is not finished.

    Args:
        corpus: Text: a file, folder or s3:// prefix of JSONL (field "text"), Parquet or plain text.
        vocab_size: Ids of the byte-level BPE trained on the corpus; one of yours: config.tokenize_plan.tokenizer_uri.
        partitions: Pods that share the work, at most 16 at the same time; no more than there are units of 128 MiB.
        sequence_length: Tokens a training sample.
        seed: Seed of the shuffle; the split does not depend on it.
        config: Further options by component, such as {"tokenize_plan" : {"deduplicate" : true}}; they win.
    """
    checked = preflight(corpus=corpus, config=config)
    checked.set_display_name("Preflight").set_caching_options(False)
    raw = import_data(source=corpus, config=config)
    raw.set_display_name("Import corpus").set_caching_options(False).after(checked)
    plan = tokenize_plan(corpus=raw.outputs["data"], vocab_size=vocab_size, partitions=partitions, config=config)
    plan.set_display_name("Plan partitions")
    with dsl.ParallelFor(plan.outputs["Output"], parallelism=AT_ONCE) as partition:
        part = tokenize_partition(
            corpus=raw.outputs["data"], plan=plan.outputs["plan"], partition=partition, config=config
        )
        part.set_display_name("Tokenize partition")
    tokens = tokenize_join(
        corpus=raw.outputs["data"],
        plan=plan.outputs["plan"],
        partitions=dsl.Collected(part.outputs["receipt"]),
        config=config,
    )
    tokens.set_display_name("Join partitions")
    shard(tokens=tokens.outputs["tokens"], sequence_length=sequence_length, seed=seed, config=config).set_display_name(
        "Shard"
    )
