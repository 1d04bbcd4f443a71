"""The finetune_full step as KFP sees it."""

from kfp import dsl

from crosstrain.components import images

BOTH = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.KUBERNETES_VOLUMES)
"""Settings of the task that the step's own pod gets too; all of them go to the job that it launches."""


@dsl.component(
    base_image=images.GPU,
    install_kfp_package=False,
    task_config_passthroughs=[dsl.TaskConfigPassthrough(one, one in BOTH) for one in dsl.TaskConfigField],
)
def finetune_full(
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    tuned: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    task_config: dsl.TaskConfig,
    steps: int = 100,
    seed: int = 0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Fine-tune every weight of a model; the control that LoRA is compared with.

    Args:
        model: Model artifact to tune.
        data: Training data: a shards artifact.
        tuned: The tuned model: a plain Hugging Face folder, with the training log.
        metrics: train_loss, validation_loss (nats a token), trainable_parameters, tokens_seen, tokens_per_second,
            peak_rss_bytes.
        task_config: Filled by KFP: what is set on the task (resources, tolerations, …), for the job it launches.
        steps: Optimizer steps.
        seed: Seed of the sample order.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside the output.
        config: Further options of this step, such as {"learning_rate" : 0.00002}.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "finetune_full",
        inputs={"model": model, "data": data},
        output=tuned,
        metrics=metrics,
        task_config=task_config,
        config=config,
        options={"steps": steps, "seed": seed, "state": state},
    )
