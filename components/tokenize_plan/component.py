"""The face of tokenize_plan: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def tokenize_plan(
    corpus: dsl.Input[dsl.Dataset],
    plan: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    tokenizer: dsl.Input[dsl.Artifact] = None,
    vocab_size: int = 0,
    partitions: int = 4,
    config: dict = {},  # noqa: B006
) -> list:
    """Plan the tokenizing of a corpus by several pods, and give the numbers of the partitions to fan out over.

    Args:
        corpus: Corpus, made by import_data.
        plan: The options and the tokenizer of the work; what the partitions make will lie beside it.
        metrics: Units of work, partitions, ids of the vocabulary.
        tokenizer: Tokens, shards or model whose tokenizer is used; none: config.tokenizer_uri, else one is trained.
        vocab_size: Ids of the byte-level BPE to train when no tokenizer is given; at least 258.
        partitions: Partitions that do the work; at most as many as there are units of config.unit_bytes.
        config: Further options (those of tokenize: text_field, on_invalid, …), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    result = run_step(
        "tokenize_plan",
        inputs={"corpus": corpus, "tokenizer": tokenizer},
        output=plan,
        metrics=metrics,
        config=config,
        options={"vocab_size": vocab_size, "partitions": partitions},
    )
    return list(range(result.artifact.facts.partitions))
