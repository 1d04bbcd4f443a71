"""Face of train_fp8: what a pipeline sees."""

from kfp import dsl

from crosstrain.components import images

BOTH = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.KUBERNETES_VOLUMES)
"""Settings of the task that the step's own pod gets too; all of them go to the job that it launches."""


@dsl.component(
    base_image=images.GPU,
    install_kfp_package=False,
    task_config_passthroughs=[dsl.TaskConfigPassthrough(one, one in BOTH) for one in dsl.TaskConfigField],
)
def train_fp8(
    shards: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    task_config: dsl.TaskConfig,
    preset: str = "tiny",
    precision: str = "fp8",
    steps: int = 200,
    seed: int = 0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Pre-train a Llama from training shards in fp8, bf16 or fp32.

    Args:
        shards: Training data: a shards artifact.
        model: The trained model: a plain Hugging Face folder.
        metrics: train_loss, validation_loss (nats a token), perplexity, parameters, tokens_seen, peak_rss_bytes
            and the throughput.
        task_config: Filled by KFP: what is set on the task (resources, tolerations, …), for the job it launches.
        preset: Model size: tiny, 125m, 350m, 1b, 3b, 8b; any other Llama: config.model_config_json.
        precision: fp8, bf16 or fp32. On a CPU fp8 is emulated, and every report says so.
        steps: Optimizer steps.
        seed: Seed of initial weights, sample order and dropout.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside the output.
        config: Further options of this step, such as {"learning_rate" : 0.001, "global_batch_size" : 32}.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "train_fp8",
        inputs={"shards": shards},
        output=model,
        metrics=metrics,
        task_config=task_config,
        config=config,
        options={"preset": preset, "precision": precision, "steps": steps, "seed": seed, "state": state},
    )
