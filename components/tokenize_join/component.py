"""The face of tokenize_join: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def tokenize_join(
    corpus: dsl.Input[dsl.Dataset],
    plan: dsl.Input[dsl.Artifact],
    partitions: dsl.Input[list[dsl.Artifact]],
    tokens: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
):
    """Make tokens of what all partitions did: the one manifest, equal to that of a single tokenize step.

    Args:
        corpus: Corpus that was planned.
        plan: The plan, made by tokenize_plan; the parts stay beside it.
        partitions: Receipts of all partitions: dsl.Collected of tokenize_partition's.
        tokens: Token documents as Megatron .bin/.idx pairs, with their tokenizer.
        metrics: Documents by fate, tokens, bytes a token.
        config: Further options of this step (workers), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "tokenize_join",
        inputs={"corpus": corpus, "plan": plan, "partitions": partitions},
        output=tokens,
        metrics=metrics,
        config=config,
    )
