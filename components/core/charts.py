"""Charts for reports: one function a chart, each giving one inline SVG that follows the page's colours.

Drawn by matplotlib with text kept as text, so that a chart is small, can be searched and read aloud, and
needs no font of its own. Colours are written as CSS variables of `core/report`, so that one SVG serves
light, dark and print. The same numbers give the same bytes. Left out on purpose: interaction, because a
report has to work in a frame without scripts.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#fffffe"
FIRST, SECOND, THIRD = "#6a7178", "#1664b0", "#b3530a"
VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper",
    FIRST: "--first", SECOND: "--second", THIRD: "--third",
}  # fmt: skip
"""Colour as matplotlib writes it to the CSS variable that replaces it."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "crosstrain", "text.parse_math": False, "axes.unicode_minus": False,
    "font.family": "sans-serif", "font.size": 9.5, "axes.titlesize": 10, "axes.labelsize": 9.5, "legend.fontsize": 9,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.edgecolor": GRID, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Dot:
    """One row of an interval chart."""

    label: str
    value: float
    low: float
    high: float
    color: str = SECOND
    limit: float | None = None
    """A threshold of this row alone, drawn as a tick across it."""


@dataclass(frozen=True)
class Series:
    """One line, or one set of points, of a line chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = SECOND
    style: Literal["line", "points"] = "line"


@dataclass(frozen=True)
class Reference:
    """A dashed line at one value, with its name written beside it."""

    label: str
    value: float
    color: str = THIRD


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit: `Axis("optimizer step")`, `Axis("loss (nats/token)")`."""

    label: str
    references: tuple[Reference, ...] = field(default=())


def interval_chart(dots: Sequence[Dot], x: Axis, title: str) -> Markup:
    """A dot and its interval a row, top to bottom, with the value written above the dot."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 0.75 + 0.46 * len(dots)), layout="constrained")
        axes = figure.add_subplot()
        rows = np.arange(len(dots))[::-1]
        for row, dot in zip(rows, dots, strict=True):
            axes.plot([dot.low, dot.high], [row, row], color=dot.color, linewidth=2.4, solid_capstyle="round")
            axes.plot([dot.value], [row], "o", color=dot.color, markersize=6.5, markeredgecolor=PAPER)
            axes.annotate(f"{dot.value:.4g}", (dot.value, row), (0, 7), textcoords="offset points", ha="center")
            if dot.limit is not None:
                axes.plot([dot.limit] * 2, [row - 0.3, row + 0.3], color=THIRD, linewidth=2, zorder=3)
        axes.set_yticks(rows, [dot.label for dot in dots], color=INK)
        axes.set_ylim(-0.6, len(dots) - 0.3)
        axes.margins(x=0.08)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        _label(axes, x, None)
        return _svg(figure, title)


def line_chart(series: Sequence[Series], x: Axis, y: Axis, title: str) -> Markup:
    """Lines and points over a shared x; lines of more than 400 points are drawn as means of equal runs."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for one in series:
            if one.style == "points":
                axes.plot(one.x, one.y, "o-", color=one.color, label=one.label, markersize=5, linewidth=1, zorder=3)
            else:
                axes.plot(*_thin(one.x, one.y), color=one.color, label=one.label, linewidth=1.3)
        axes.grid(axis="y")
        axes.margins(y=0.1)
        _label(axes, x, y)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
        return _svg(figure, title)


def histogram(values: Sequence[float], x: Axis, y: Axis, title: str) -> Markup:
    """How values are distributed, in at most 40 bins of equal width."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        axes = figure.add_subplot()
        bins = int(np.clip(2 * np.sqrt(len(values)), 5, 40))
        axes.hist(values, bins=bins, color=SECOND, edgecolor=PAPER, linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.grid(axis="y")
        axes.margins(y=0.2)
        _label(axes, x, y)
        return _svg(figure, title)


def _thin(x: Sequence[float], y: Sequence[float], most: int = 400) -> tuple[Sequence[float], Sequence[float]]:
    if len(x) <= most:
        return x, y
    runs_x, runs_y = np.array_split(np.asarray(x, float), most), np.array_split(np.asarray(y, float), most)
    return [float(run.mean()) for run in runs_x], [float(run.mean()) for run in runs_y]


def _label(axes: Axes, x: Axis, y: Axis | None) -> None:
    """Write the axis labels, and draw references: vertical ones of x, horizontal ones of y."""
    axes.set_xlabel(x.label)
    for one in x.references:
        axes.axvline(one.value, color=one.color, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(one.label, (one.value, 1), (4, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", color=one.color, va="bottom")  # fmt: skip
    if y is None:
        return
    axes.set_ylabel(y.label)
    for one in y.references:
        axes.axhline(one.value, color=one.color, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(one.label, (1, one.value), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", color=one.color, ha="right")  # fmt: skip


def _svg(figure: Figure, title: str) -> Markup:
    """The figure as inline SVG: no prolog, no fonts, no repeated ids, colours as CSS variables."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    text = buffer.getvalue().decode()
    text = re.sub(r".*?(?=<svg)", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{escape(title)}"', text, count=1)
    text = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda hit: _variable(hit.group()), text)
    return Markup(re.sub(r"\s*\n\s*", " ", text).strip())


def _variable(color: str) -> str:
    return f"var({VARIABLES[color]})"
