"""Face of preflight: what a pipeline sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def preflight(
    report: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    summary: dsl.Output[dsl.Markdown],
    corpus: str = "",
    tuning_corpus: str = "",
    model: str = "",
    state: str = "",
    preset: str = "",
    precision: str = "",
    vocab_size: int = 0,
    sequence_length: int = 0,
    train_steps: int = 0,
    tune_steps: int = 0,
    method: str = "",
    rank: int = 0,
    config: dict = {},  # noqa: B006
):
    """Check a run before anything is spent, and end it with every finding at once.

    Args:
        report: Which checks were made.
        metrics: warnings, not_checked.
        summary: Every finding.
        corpus: Text that the run reads.
        tuning_corpus: Text of the domain to tune for.
        model: Model that is fine-tuned; empty: the one that the run trains.
        state: Prefix for checkpoints.
        preset: Model to pre-train; empty: none.
        precision: Arithmetic of pre-training.
        vocab_size: Entries of its vocabulary.
        sequence_length: Tokens a training sample.
        train_steps: Optimizer steps of pre-training.
        tune_steps: Optimizer steps of fine-tuning; 0: none.
        method: lora or dora.
        rank: Rank of the adapter.
        config: The whole run's further options by component; its own: {"preflight" : {"hours" : 12}}.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "preflight",
        inputs={},
        output=report,
        metrics=metrics,
        markdown=summary,
        config=config,
        options={
            "corpus": corpus,
            "tuning_corpus": tuning_corpus,
            "model": model,
            "state": state,
            "preset": preset,
            "precision": precision,
            "vocab_size": vocab_size,
            "sequence_length": sequence_length,
            "train_steps": train_steps,
            "tune_steps": tune_steps,
            "method": method,
            "rank": rank,
            "sections": config,
        },
    )
