"""The face of shard: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def shard(
    tokens: dsl.Input[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    sequence_length: int = 1024,
    seed: int = 0,
    config: dict = {},  # noqa: B006
):
    """Split token documents into train and validation, shuffle them and pack them into training shards.

    Args:
        tokens: Token documents, made by tokenize.
        shards: Shards of both splits as Megatron .bin/.idx pairs, with the tokenizer.
        metrics: Documents, tokens and samples of each split.
        sequence_length: Tokens a training sample.
        seed: Seed of the shuffle; the split does not depend on it.
        config: Further options of this step (validation_fraction, …), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "shard",
        inputs={"tokens": tokens},
        output=shards,
        metrics=metrics,
        config=config,
        options={"sequence_length": sequence_length, "seed": seed},
    )
