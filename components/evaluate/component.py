"""The KFP face of evaluate."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def evaluate(
    candidate: dsl.Input[dsl.Model],
    baseline: dsl.Input[dsl.Model],
    data: dsl.Input[dsl.Dataset],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    forgetting: dsl.Input[dsl.Dataset] = None,
    adapter: dsl.Input[dsl.Model] = None,
    margin: float = 0.0,
    config: dict = {},  # noqa: B006
):
    """Compare a candidate model with a baseline on held-out text: losses with intervals, a verdict and a report.

    Args:
        candidate: Model artifact to judge, such as the merged model.
        baseline: Model artifact to compare with, such as the base model.
        data: Shards artifact whose validation split decides the verdict.
        forgetting: Shards artifact of what the baseline knew before; shows what the candidate forgot.
        adapter: Adapter artifact that made the candidate, for its loss curve.
        margin: Nats/token by which the candidate may be worse and still pass; 0 demands that it is not worse.
        config: Further options of this step by name, or of all steps by component; see the README beside.
        evaluation: Evaluation artifact: report, metrics, losses by document, generations.
        metrics: Losses (nats/token), perplexities, accuracies and the verdict (passed: 1 or 0).
        report: The report as one self-contained page.
        summary: The verdict and the losses in a table.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "evaluate",
        inputs={
            "candidate": candidate,
            "baseline": baseline,
            "data": data,
            "forgetting": forgetting,
            "adapter": adapter,
        },
        options={"margin": margin},
        output=evaluation,
        metrics=metrics,
        html=report,
        markdown=summary,
        config=config,
    )
