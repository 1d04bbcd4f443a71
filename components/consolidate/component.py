"""The consolidate step as KFP sees it."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def consolidate(
    model: dsl.Input[dsl.Model],
    source: str,
    adapter: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
) -> None:
    """Put a sharded adapter checkpoint of optimum-neuron together as a standard peft folder, on a CPU.

    Args:
        model: Model artifact that was tuned.
        source: Prefix that the training wrote its checkpoints to.
        adapter: Standard peft adapter folder.
        metrics: steps, trainable_parameters, tensor_parallel, pipeline_parallel, peak_rss_bytes.
        config: Further options of this step, or a mapping of component to options.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "consolidate",
        inputs={"model": model},
        output=adapter,
        metrics=metrics,
        config=config,
        options={"source": source},
    )
