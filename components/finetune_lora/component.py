"""The finetune_lora step as KFP sees it."""

from kfp import dsl

from crosstrain.components import images

BOTH = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.KUBERNETES_VOLUMES)
"""Settings of the task that the step's own pod gets too; all of them go to the job that it launches."""


@dsl.component(
    base_image=images.GPU,
    install_kfp_package=False,
    task_config_passthroughs=[dsl.TaskConfigPassthrough(one, one in BOTH) for one in dsl.TaskConfigField],
)
def finetune_lora(
    model: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    adapter: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    task_config: dsl.TaskConfig,
    method: str = "lora",
    rank: int = 16,
    steps: int = 100,
    seed: int = 0,
    state: str = "",
    config: dict = {},  # noqa: B006
) -> None:
    """Fine-tune a model with LoRA or DoRA through peft.

    Args:
        model: Model artifact to tune.
        data: Shards, or a corpus of JSONL rows with prompt and completion or chat messages.
        adapter: Standard peft adapter folder, with the training log.
        metrics: train_loss (nats a token), trainable_parameters, trainable_fraction, tokens_seen,
            tokens_per_second, rows, rows_dropped, peak_rss_bytes.
        task_config: Filled by KFP: what is set on the task (resources, tolerations, …), for the job it launches.
        method: lora or dora.
        rank: Rank of the updates.
        steps: Optimizer steps.
        seed: Seed of initial factors, sample order and dropout.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside the output.
        config: Further options of this step, such as {"alpha" : 32, "learning_rate" : 0.0002}.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "finetune_lora",
        inputs={"model": model, "data": data},
        output=adapter,
        metrics=metrics,
        task_config=task_config,
        config=config,
        options={"method": method, "rank": rank, "steps": steps, "seed": seed, "state": state},
    )
