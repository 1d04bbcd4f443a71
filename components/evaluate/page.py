"""The evaluation's report for people: the HTML page, and the short Markdown summary.

Top to bottom as a reader asks: the answer; what it ran on; the losses; how training got there; where the
difference sits; what the models write; how it was measured; where everything came from.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from crosstrain.components.core import report
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.charts import (
    FIRST,
    SECOND,
    Axis,
    Dot,
    Reference,
    Series,
    histogram,
    interval_chart,
    line_chart,
)
from crosstrain.components.evaluate.costs import StepCost, markdown_costs, render_costs
from crosstrain.components.evaluate.curves import Curve
from crosstrain.components.evaluate.outcome import Outcome, SetOutcome
from crosstrain.components.evaluate.statistics import CONFIDENCE, Interval, perplexity

EMULATED = (
    "FP8 was emulated in training: values were rounded as FP8 hardware rounds them and multiplied in higher "
    "precision. The losses are those of FP8 numerics; they say nothing of FP8's speed or memory."
)
IMPROVEMENT = (
    "Right of the grey line the candidate is better. An orange mark is a threshold, minus the margin: the lower end of "
    "the interval must not be below it. The models are compared document by document, so that this interval can "
    "exclude 0 where the intervals of the losses above overlap."
)
UNIGRAM = (
    "A model that only knew how frequent each token is would reach the unigram entropy; below it, context is used. "
    "Logs of more than 400 steps are drawn as means of equal runs of steps."
)
METHOD = (
    "Loss is the mean negative log-likelihood of each token given those before it in its document, within its sample. "
    "Documents packed into one sample do not see each other, and padding is left out.",
    f"Intervals are {CONFIDENCE:.0%} percentile bootstrap intervals: whole documents are resampled, both models "
    "together. Pass means that the lower end of the improvement's interval is not below minus the margin.",
    "Unigram entropy is the cross-entropy, on the same predictions, of the training split's token frequencies, each "
    "count raised by one.",
)
SET_NAMES = {"data": "Held-out data", "forgetting": "Forgetting set"}
COLUMNS = ("", "Loss, nats/token", "95% interval", "Perplexity", "Next-token accuracy", "Bits/byte")

Sets = Mapping[str, SetOutcome]


def render_page(
    outcome: Outcome,
    curves: Sequence[Curve],
    inputs: Mapping[str, Artifact],
    options: Mapping[str, Any],
    costs: Sequence[StepCost] = (),
) -> str:
    """The self-contained report; without costs it is the same bytes for the same work."""
    sets = _sets(outcome)
    tone: report.Tone = "good" if outcome.passed else "bad"
    parts = [
        report.verdict(outcome.verdict.upper(), tone, *outcome.sentences()),
        _ran_on(outcome, inputs),
        _losses(sets, {SET_NAMES["data"]: outcome.margin, SET_NAMES["forgetting"]: outcome.max_forgetting}),
    ]
    if curves:
        parts.append(_curves(curves, sets))
    parts.append(_documents(sets))
    if outcome.generations:
        parts.append(_generations(outcome))
    if costs:
        parts.append(render_costs(costs))
    parts += [_method(sets), _lineage(inputs), _options(options)]
    return report.page("Evaluation: candidate against baseline", *parts)


def render_markdown(outcome: Outcome, costs: Sequence[StepCost] = ()) -> str:
    """The summary that the KFP UI shows: verdict, reason, one table a set."""
    told = " ".join(outcome.sentences())
    lines = [f"## Verdict: {outcome.verdict}\n\n{told}\n"]
    for name, one in _sets(outcome).items():
        lines.append(f"**{name}**\n\n" + report.markdown_table(("Model", *COLUMNS[1:]), _rows(one)))
    lines.append(f"Measured on {report.markdown_text(outcome.device)} in {outcome.dtype}.\n")
    if costs:
        lines.append(markdown_costs(costs))
    files = ("report.html", "metrics.json", "per_document.jsonl", "generations.jsonl")
    lines.append(f"Files of the artifact: {', '.join(f'[{name}]({name})' for name in files)}.\n")
    return "\n".join(lines)


def _sets(outcome: Outcome) -> dict[str, SetOutcome]:
    sets = {"data": outcome.data, "forgetting": outcome.forgetting}
    return {SET_NAMES[name]: one for name, one in sets.items() if one is not None}


def _ran_on(outcome: Outcome, inputs: Mapping[str, Artifact]) -> Markup:
    """Device, data type and the precision each model was trained in, before any number."""
    labels = {role: str(inputs[role].facts.precision) for role in ("baseline", "candidate")}
    told = f"Both models were evaluated on {outcome.device} in {outcome.dtype}. "
    told += f"Precision labels of their training: baseline {labels['baseline']}, candidate {labels['candidate']}."
    parts = [report.paragraph(told)]
    if any("emulated" in label for label in labels.values()):
        parts.append(report.paragraph(EMULATED))
    for role in labels:
        if events := inputs[role].facts.guard_events:
            told = f"The divergence guard acted {len(events)} times in the {role}'s training; its manifest says how."
            parts.append(report.paragraph(told))
    return report.join(parts)


def _losses(sets: Sets, margins: Mapping[str, float | None]) -> Markup:
    parts = []
    for name, one in sets.items():
        comparison = one.comparison
        dots = [_dot("baseline", comparison.baseline_loss, FIRST), _dot("candidate", comparison.candidate_loss, SECOND)]
        chart = interval_chart(dots, Axis("loss (nats/token), with 95% interval"), f"{name}: losses with intervals")
        table = report.table(COLUMNS, _rows(one), numbers=range(1, len(COLUMNS)))
        parts.append(report.subsection(name, table, report.figure(chart)))
    limits = {name: None if margins[name] is None else 0.0 - (margins[name] or 0.0) for name in sets}
    dots = [_dot(name, one.comparison.improvement, SECOND, limits[name]) for name, one in sets.items()]
    axis = Axis("improvement: baseline's loss − candidate's loss (nats/token)", (Reference("equal", 0.0, FIRST),))
    chart = interval_chart(dots, axis, "Improvement with intervals")
    return report.section("Losses", *parts, report.subsection("Improvement", report.figure(chart, IMPROVEMENT)))


def _dot(label: str, interval: Interval, color: str, limit: float | None = None) -> Dot:
    return Dot(label, interval.value, interval.low, interval.high, color, limit)


def _rows(one: SetOutcome) -> list[list[str]]:
    """The rows of a set's table, in the order of COLUMNS."""
    found, unigram = one.comparison, one.unigram_entropy
    rows = [
        [
            name,
            f"{loss.value:.4f}",
            _span(loss),
            f"{perplexity(loss).value:.2f}",
            f"{accuracy.value:.2%}",
            _bits(one.bits_per_byte(loss.value)),
        ]
        for name, loss, accuracy in (
            ("Baseline", found.baseline_loss, found.baseline_accuracy),
            ("Candidate", found.candidate_loss, found.candidate_accuracy),
        )
    ]
    better = found.improvement
    ratio, gain = f"× {perplexity(-better).value:.4f}", f"{found.accuracy_gain.value:+.2%}"
    bits = _bits(one.bits_per_byte(better.value), "+")
    rows.append(["Improvement", f"{better.value:+.4f}", _span(better), ratio, gain, bits])
    if unigram is not None:
        rows.append(["Unigram entropy", f"{unigram:.4f}", "–", "–", "–", _bits(one.bits_per_byte(unigram))])
    return rows


def _span(interval: Interval) -> str:
    return f"{interval.low:.4f} to {interval.high:.4f}"


def _bits(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.4f}"


def _curves(curves: Sequence[Curve], sets: Sets) -> Markup:
    charts = []
    for curve in curves:
        known = {name: one for name, one in sets.items() if one.shards_sha256 in curve.trained_on}
        entropies = [one.unigram_entropy for one in known.values() if one.unigram_entropy is not None]
        references = tuple(Reference("unigram entropy", entropy) for entropy in entropies)
        series = [Series("training loss", curve.steps, curve.losses, SECOND)]
        if curve.validation_steps:
            series.append(Series("validation loss", curve.validation_steps, curve.validation_losses, FIRST, "points"))
        chart = line_chart(series, Axis("optimizer step"), Axis("loss (nats/token)", references), f"{curve.name}: loss")
        told = f"the training split of the {' and the '.join(known).lower()}" if known else "other data"
        charts.append(report.figure(chart, f"{curve.name.capitalize()}, trained on {told}."))
    return report.section("Loss curves", report.grid(charts), report.paragraph(UNIGRAM, note=True))


def _documents(sets: Sets) -> Markup:
    parts = []
    for name, one in sets.items():
        differences = one.comparison.differences
        better = sum(x > 0 for x in differences)
        axis = Axis("improvement of one document (nats/token)", (Reference("equal", 0.0, FIRST),))
        chart = histogram(differences, axis, Axis("documents"), f"{name}: improvement by document")
        share = f"{better} of {len(differences)} documents ({better / len(differences):.1%})"
        parts.append(report.figure(chart, f"{name}: the candidate is better on {share}."))
    return report.section("Differences by document", report.grid(parts))


def _generations(outcome: Outcome) -> Markup:
    told = "Both models go on from the beginnings of held-out documents; each step takes the likeliest token."
    parts = [report.paragraph(told, note=True)]
    for one in outcome.generations:
        passages = {
            "Prompt": one.prompt,
            "Original": one.truth,
            "Baseline": one.baseline,
            "Candidate": one.candidate,
        }
        parts.append(report.subsection(f"Document {one.document}", report.texts(passages)))
    return report.section("Generations", *parts)


def _method(sets: Sets) -> Markup:
    parts = [report.paragraph(text) for text in METHOD]
    rows = []
    for name, one in sets.items():
        found = one.comparison
        text_bytes = "–" if one.text_bytes is None else f"{one.text_bytes:,}"
        resampled = f"{found.units:,} {found.unit}s"
        rows.append([name, f"{found.documents:,}", f"{found.tokens:,}", resampled, text_bytes])
        if found.reason:
            parts.append(report.paragraph(f"{name}: {found.reason}"))
    header = ("", "Documents", "Predicted tokens", "Resampled", "UTF-8 bytes predicted")
    return report.section("How it was measured", *parts, report.table(header, rows, numbers=range(1, 5)))


def _lineage(inputs: Mapping[str, Artifact]) -> Markup:
    rows: list[list[Markup | str]] = []
    for name, artifact in sorted(inputs.items()):
        manifest = artifact.manifest
        sources = [
            Markup("{} ({}) {}").format(source, one.kind, report.code(one.sha256[:16]))
            for source, one in sorted(manifest.inputs.items())
        ]
        made_from = report.join(sources, Markup("<br>")) if sources else "–"
        rows.append([name, manifest.kind, manifest.component, report.code(manifest.sha256[:16]), made_from])
    header = ("Input", "Kind", "Made by", "SHA-256 of its manifest", "Made from")
    note = report.paragraph("The first 16 of 64 digits; this evaluation's own manifest holds them whole.", note=True)
    return report.section("Lineage", report.table(header, rows), note)


def _options(options: Mapping[str, Any]) -> Markup:
    rows = [[name, report.code(json.dumps(value))] for name, value in sorted(options.items())]
    return report.section("Options", report.table(("Option", "Value"), rows))
