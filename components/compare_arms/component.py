"""The face of compare_arms: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def compare_arms(
    control: dsl.Input[list[dsl.Model]],
    candidate: dsl.Input[list[dsl.Model]],
    comparison: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    study: str = "fp8",
    margin_percent: float = 1.0,
    config: dict = {},  # noqa: B006
):
    """Compare two arms of a study, each run with the same seeds: loss gap with interval, verdict, report.

    Args:
        control: Models or adapters of the control arm, one a seed: dsl.Collected of a training step's.
        candidate: Models or adapters of the arm in question, of the same seeds, data and steps.
        comparison: Comparison artifact: losses by seed, gap, interval, verdict.
        metrics: equivalent (1 or 0), gap_percent with its ends, losses (nats/token), perplexities.
        report: The report as one self-contained page.
        summary: The verdict and the tables.
        study: fp8 (number formats, and nothing else) or lora (full fine-tuning is the control).
        margin_percent: Margin of equivalence, set before the run: percent of the control's held-out loss.
        config: Further options of this step (instance_type, prices), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "compare_arms",
        inputs={"control": control, "candidate": candidate},
        output=comparison,
        metrics=metrics,
        html=report,
        markdown=summary,
        config=config,
        options={"study": study, "margin_percent": margin_percent},
    )
