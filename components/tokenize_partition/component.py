"""The face of tokenize_partition: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def tokenize_partition(
    corpus: dsl.Input[dsl.Dataset],
    plan: dsl.Input[dsl.Artifact],
    partition: int,
    receipt: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
):
    """Do one partition of a planned tokenizing; inside a ParallelFor over what tokenize_plan gives.

    Args:
        corpus: Corpus that was planned.
        plan: The plan, made by tokenize_plan; what this partition makes goes beside it.
        partition: Which one, from 0 on.
        receipt: That this partition is done, for tokenize_join.
        metrics: Units, documents and tokens of this partition, tokens a second.
        config: Further options of this step (workers), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "tokenize_partition",
        inputs={"corpus": corpus, "plan": plan},
        output=receipt,
        metrics=metrics,
        config=config,
        options={"partition": partition},
    )
