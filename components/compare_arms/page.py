"""The comparison's report for people: the HTML page, and the short Markdown summary.

Top to bottom as a reader asks: the verdict; what ran; the losses by seed, from which every number of the verdict can
be computed again; the curves; what was measured besides; what others published.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from crosstrain.components.compare_arms.arms import DIGITS, Pair, Run
from crosstrain.components.compare_arms.comparison import Comparison, Price
from crosstrain.components.compare_arms.published import PUBLISHED, TITLES
from crosstrain.components.compare_arms.statistics import CONFIDENCE, Estimate, Verdict
from crosstrain.components.core import report
from crosstrain.components.core.charts import FIRST, SECOND, Axis, Dot, Reference, Series, interval_chart, line_chart

COLUMNS = (
    "Seed", "Control loss", "Candidate loss", "Gap, nats/token", "Gap, %", "Control perplexity", "Candidate perplexity",
)  # fmt: skip
ESTIMATE = ("Seeds", "Mean gap, %", "Standard deviation", "Student t", "Low end, %", "High end, %", "Margin, %")
UNMEASURED = (
    "An arm imitated FP8 in higher precision. Its losses are those of FP8's numbers; its speed and memory are not "
    "FP8's, and none are given here."
)
METHOD = (
    "Loss is the held-out loss after the last step (nats/token, in the arithmetic that the run trains in), over the "
    "same first samples of the validation split in every run. The gap of a seed is the candidate's loss over the "
    "control's, minus one. Runs of one seed have the same order of samples.",
    f"The interval is the mean gap plus and minus t x standard deviation / sqrt(seeds): Student's {CONFIDENCE:.0%} "
    "interval over the seeds. Equivalent: all of it is inside plus and minus the margin, which was set before the "
    "runs. Different: all of it is outside. Otherwise nothing is decided; an undecided study has not shown that the "
    "arms are equal.",
    f"Losses are taken to {DIGITS} decimals and everything else is computed from them, so that this table gives every "
    "number of the verdict.",
)
WORDS: dict[Verdict, str] = {"equivalent": "EQUIVALENT", "different": "DIFFERENT", "undecided": "UNDECIDED"}
TONES: dict[Verdict, report.Tone] = {"equivalent": "good", "different": "bad", "undecided": "plain"}


def render_page(found: Comparison, options: Mapping[str, Any]) -> str:
    """The self-contained report."""
    parts = [
        report.verdict(WORDS[found.verdict], TONES[found.verdict], *sentences(found)),
        _ran(found),
        _losses(found),
        _curves(found),
        _measured(found),
        _numerics(found),
        _published(found),
        report.section("How it was judged", *(report.paragraph(text) for text in METHOD)),
        _lineage(found),
        report.section(
            "Options",
            report.table(
                ("Option", "Value"), [[name, report.code(json.dumps(value))] for name, value in sorted(options.items())]
            ),
        ),
    ]
    return report.page(TITLES[found.study], *(part for part in parts if part))


def render_markdown(found: Comparison) -> str:
    """The summary that the KFP UI shows."""
    parts = [f"## {WORDS[found.verdict].capitalize()}\n\n{' '.join(sentences(found))}\n"]
    if found.emulated:
        parts.append(UNMEASURED + "\n")
    parts.append(report.markdown_table(COLUMNS, _rows(found)))
    parts.append(report.markdown_table(ESTIMATE, [_estimate_row(found)]))
    header, rows = _published_rows(found)
    parts.append(report.markdown_table(header, rows))
    return "\n".join(parts)


def sentences(found: Comparison) -> list[str]:
    """What was found, and by which rule."""
    gap, margin = found.gap, found.margin
    control, candidate = found.labels
    word = "higher" if gap.mean >= 0 else "lower"
    rule = {
        "equivalent": f"The whole interval is inside plus and minus the margin of {margin:g}%.",
        "different": f"The whole interval is outside plus and minus the margin of {margin:g}%.",
        "undecided": f"The interval reaches beyond the margin of {margin:g}% and does not exclude what is inside it: "
        "more seeds, or longer runs, would decide.",
    }[found.verdict]
    told = [
        f"The held-out loss of {candidate} is {abs(gap.mean):.3f}% {word} than that of {control} "
        f"({CONFIDENCE:.0%} interval {gap.low:+.3f}% to {gap.high:+.3f}%, {gap.count} seeds).",
        rule,
    ]
    if found.unlearned:
        told.append(
            f"But the control has not learned more than how frequent each token is (unigram entropy "
            f"{found.unigram_entropy:.3f} nats/token): train longer before the verdict means anything."
        )
    if found.emulated:
        told.append("FP8 was emulated: this is about FP8's numbers, not its speed or memory.")
    return told


def _ran(found: Comparison) -> Markup:
    control, candidate = found.arms
    facts, options = control[0].artifact.facts, control[0].artifact.manifest.options
    samples = options["evaluate_batches"] * options["micro_batch_size"]
    held_out = f"the first {samples} samples" if samples else "all samples"
    told = (
        f"{found.gap.count} runs of each arm, {facts.steps} steps and {facts.tokens_seen:,} tokens a run; held-out "
        f"losses over {held_out} of the validation split, or as many as there are."
    )
    parts = [report.paragraph(told)]
    if found.emulated:
        parts.append(report.paragraph(UNMEASURED))
    rows = [
        [name, run.label, f"{run.trained:,}", str(_guarded(arm))]
        for name, arm in (("Control", control), ("Candidate", candidate))
        for run in arm[:1]
    ]
    header = ("Arm", "Ran as", "Parameters trained", "Times the divergence guard acted")
    return report.section("What ran", *parts, report.table(header, rows, numbers=(2, 3)))


def _guarded(arm: list[Run]) -> int:
    return sum(len(getattr(run.artifact.facts, "guard_events", ())) for run in arm)


def _rows(found: Comparison) -> list[list[str]]:
    rows = [_row(str(pair.control.seed), pair.control.loss, pair.candidate.loss, pair) for pair in found.pairs]
    control, candidate = found.mean_losses()
    return [*rows, _row("Mean", control, candidate, None, found.gap.mean)]


def _row(name: str, control: float, candidate: float, pair: Pair | None, percent: float = 0.0) -> list[str]:
    return [
        name,
        f"{control:.{DIGITS}f}",
        f"{candidate:.{DIGITS}f}",
        f"{candidate - control:+.{DIGITS}f}",
        f"{pair.percent if pair else percent:+.4f}",
        f"{math.exp(control):.3f}",
        f"{math.exp(candidate):.3f}",
    ]


def _estimate_row(found: Comparison) -> list[str]:
    gap = found.gap
    numbers = (gap.mean, gap.deviation, gap.quantile, gap.low, gap.high)
    return [str(gap.count), *(f"{number:.4f}" for number in numbers), f"{found.margin:g}"]


def _losses(found: Comparison) -> Markup:
    dots = [Dot(f"seed {pair.control.seed}", pair.percent, pair.percent, pair.percent, FIRST) for pair in found.pairs]
    dots.append(Dot("mean, with interval", found.gap.mean, found.gap.low, found.gap.high, SECOND))
    references = (
        Reference("-margin", -found.margin),
        Reference("equal", 0.0, FIRST),
        Reference("+margin", found.margin),
    )
    chart = interval_chart(dots, Axis("gap of the held-out loss (%)", references), "Gap by seed, and its interval")
    return report.section(
        "Held-out losses by seed",
        report.table(COLUMNS, _rows(found), numbers=range(1, len(COLUMNS))),
        report.table(ESTIMATE, [_estimate_row(found)], numbers=range(1, len(ESTIMATE))),
        report.figure(chart, "Right of the grey line the candidate's loss is higher. Orange: the margins."),
    )


def _curves(found: Comparison) -> Markup:
    series = [
        Series(f"{name}: {arm[0].label}", *_mean_curve(arm), color)
        for name, arm, color in zip(("control", "candidate"), found.arms, (FIRST, SECOND), strict=True)
    ]
    entropy = found.unigram_entropy
    references = () if entropy is None else (Reference("unigram entropy", entropy),)
    losses = line_chart(
        series, Axis("optimizer step"), Axis("training loss (nats/token)", references), "Training loss by step"
    )
    steps, ours, theirs = series[0].x, series[0].y, dict(zip(series[1].x, series[1].y, strict=True))
    gaps = [theirs[step] - loss for step, loss in zip(steps, ours, strict=True) if step in theirs]
    shared = [step for step in steps if step in theirs]
    axis = Axis("gap (nats/token)", (Reference("equal", 0.0, FIRST),))
    gap = line_chart([Series("candidate - control", shared, gaps)], Axis("optimizer step"), axis, "Gap by step")
    told = "Below the unigram entropy a model uses context, and not token frequencies alone." if references else ""
    return report.section(
        "Training loss",
        report.grid([report.figure(losses, told), report.figure(gap, "A gap that grows is one to watch.")]),
        report.paragraph("Means over the seeds.", note=True),
    )


def _mean_curve(arm: list[Run]) -> tuple[list[float], list[float]]:
    """Steps that every run of the arm has, and the mean loss at each."""
    curves = [dict(run.curve) for run in arm]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [float(step) for step in steps], [math.fsum(curve[step] for curve in curves) / len(curves) for step in steps]


def _measured(found: Comparison) -> Markup:
    """Speed, time, memory and cost, or why there are none."""
    if found.emulated:
        return report.section("Speed, memory, cost", report.paragraph(UNMEASURED))
    if found.speed is None or found.costs is None:
        why = "The runs have no record of their speed, or ran on different platforms: nothing is compared."
        return report.section("Speed, memory, cost", report.paragraph(why))
    control, candidate = found.arms
    rows = [
        ["Tokens a second", *_both(control, candidate, lambda run: run.metrics["tokens_per_second"], ",.0f")],
        ["Training time of a run, s", *_both(control, candidate, lambda run: run.seconds or 0.0, ".1f")],
        ["Peak memory of the process, MiB",
         *_both(control, candidate, lambda run: run.metrics["peak_rss_bytes"] / 2**20, ",.0f")],
        ["Cost of a run, USD", *(_usd(price) for price in found.costs), _change(*(price.usd for price in found.costs))],
    ]  # fmt: skip
    told = (
        f"Means over the seeds, on {control[0].platform}. Speed changes by {found.speed.mean:+.1f}% "
        f"({CONFIDENCE:.0%} interval {found.speed.low:+.1f}% to {found.speed.high:+.1f}%)."
    )
    notes = {price.provenance for price in found.costs}
    return report.section(
        "Speed, memory, cost",
        report.paragraph(told),
        report.table(("", "Control", "Candidate", "Change"), rows, numbers=range(1, 4)),
        *(report.paragraph(f"Cost: {note}.", note=True) for note in sorted(notes)),
    )


def _both(control: list[Run], candidate: list[Run], value: Any, form: str) -> list[str]:
    ours, theirs = (math.fsum(value(run) for run in arm) / len(arm) for arm in (control, candidate))
    return [f"{ours:{form}}", f"{theirs:{form}}", _change(ours, theirs)]


def _change(before: float | None, after: float | None) -> str:
    return f"{100 * (after / before - 1):+.1f}%" if before and after is not None else "–"


def _usd(price: Price) -> str:
    return "–" if price.usd is None else f"{price.usd:.4f}"


def _numerics(found: Comparison) -> Markup:
    """What FP8 did to the numbers, where the logs tell."""
    worst: dict[str, float] = {}
    for run in found.arms[1]:
        for name, value in run.numerics.items():
            worst[name] = max(worst.get(name, -math.inf), value)
    if not worst:
        return Markup("")
    rows = [[name.removeprefix("fp8_").replace("_", " "), f"{value:.4g}"] for name, value in sorted(worst.items())]
    told = "The largest value in any run of the candidate, over the steps that were looked at, of the worst layer."
    return report.section(
        "What FP8 did to the numbers",
        report.paragraph(told, note=True),
        report.table(("Tensor and figure", "Largest"), rows, numbers=(1,)),
    )


def _published_rows(found: Comparison) -> tuple[tuple[str, ...], list[list[str]]]:
    ours = {
        "loss": f"{found.gap.mean:+.2f}% ({found.gap.low:+.2f}% to {found.gap.high:+.2f}%)",
        "speed": _estimated(found.speed),
        "time": _change(*(_mean_seconds(arm) for arm in found.arms)) if found.speed else "not measured",
        "cost": _change(*(price.usd for price in found.costs)) if found.costs else "not measured",
    }
    rows = [[name, figure, ours[key]] for key, name, figure in PUBLISHED[found.study].rows]
    return ("", "Published", "Here"), rows


def _estimated(value: Estimate | None) -> str:
    return "not measured" if value is None else f"{value.mean:+.1f}% ({value.low:+.1f}% to {value.high:+.1f}%)"


def _mean_seconds(arm: list[Run]) -> float:
    return math.fsum(run.seconds or 0.0 for run in arm) / len(arm)


def _published(found: Comparison) -> Markup:
    header, rows = _published_rows(found)
    source = report.paragraph(PUBLISHED[found.study].source, note=True)
    return report.section("Beside published figures", report.table(header, rows, numbers=(1, 2)), source)


def _lineage(found: Comparison) -> Markup:
    rows = [
        [
            str(pair.control.seed),
            *(report.code(run.artifact.manifest.sha256[:16]) for run in (pair.control, pair.candidate)),
        ]
        for pair in found.pairs
    ]
    data = ", ".join(
        f"{name} ({source.kind}) {source.sha256[:16]}"
        for name, source in sorted(found.pairs[0].control.artifact.manifest.inputs.items())
    )
    return report.section(
        "Lineage",
        report.paragraph(f"All runs were made from: {data}."),
        report.table(("Seed", "Control's manifest", "Candidate's manifest"), rows),
        report.paragraph("The first 16 of 64 digits of SHA-256.", note=True),
    )
