"""The merge step as KFP sees it."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def merge(
    model: dsl.Input[dsl.Model],
    adapter: dsl.Input[dsl.Model],
    merged: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
) -> None:
    """Merge an adapter into its base model, tensor by tensor, and prove that the merged model computes the same.

    Args:
        model: Model artifact that the adapter was trained on.
        adapter: Adapter artifact, LoRA or DoRA.
        merged: Model artifact, a plain Hugging Face folder in the base's type and shards.
        metrics: Largest logit difference with its tolerance, mean KL, argmax agreement, bytes, speed.
        config: Further options of this step, or a mapping of component to options.
    """
    from crosstrain.components.core.step import run_step

    run_step("merge", inputs={"model": model, "adapter": adapter}, output=merged, metrics=metrics, config=config)
