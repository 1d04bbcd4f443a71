"""Pages and charts: self-contained, escaped, labelled, small, and the same bytes every time."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from markupsafe import Markup

from crosstrain.components.core import report
from crosstrain.components.core.charts import (
    VARIABLES,
    Axis,
    Dot,
    Reference,
    Series,
    histogram,
    interval_chart,
    line_chart,
)

ATTACK = "<script>alert('x')</script> & \"quoted\" </p>"


def charts():
    """One of each kind, with hostile labels and a log too long to draw point by point."""
    long = Series("training <loss>", range(5000), [5 + (n % 7) / 7 for n in range(5000)])
    points = Series("validation loss", [1000, 2000], [5.2, 5.1], style="points")
    return [
        interval_chart(
            [Dot("a", 1.0, 0.5, 1.5), Dot("b $x_1$", 2.0, 1.9, 2.4, limit=0.0)], Axis("loss (nats/token)"), "t"
        ),
        line_chart(
            [long, points], Axis("optimizer step"), Axis("loss (nats/token)", (Reference("unigram", 6.0),)), "t"
        ),
        histogram([0.1, 0.2, 0.2, 0.9], Axis("improvement (nats/token)"), Axis("documents"), 'a "title" <b>'),
    ]


def texts(chart):
    """Every text of a chart, as an XML parser reads it."""
    tree = ElementTree.fromstring(chart)
    return [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_axes_are_labelled_and_ticked():
    interval, line, bars = (texts(chart) for chart in charts())
    assert {"loss (nats/token)", "a", "b $x_1$", "2"} <= set(interval)
    assert {"optimizer step", "loss (nats/token)", "training <loss>", "validation loss", "unigram", "1000"} <= set(line)
    assert {"improvement (nats/token)", "documents", "1"} <= set(bars)


def test_charts_are_the_same_bytes_and_hold_no_date():
    assert charts() == charts()
    assert not re.search(r"\d{4}-\d\d-\d\d|matplotlib", "".join(charts()))


def test_charts_follow_the_page_s_colours_and_bring_no_font():
    for chart in charts():
        assert not re.search(r"#[0-9a-fA-F]{6}", chart), "a fixed colour"
        assert set(re.findall(r"var\((--\w+)\)", chart)) <= set(VARIABLES.values())
        assert "font-family" not in chart and "<style" not in chart
        assert ' role="img" aria-label=' in chart
    assert all(f"{name}:" in report.STYLE for name in VARIABLES.values())


def test_a_long_log_is_drawn_small():
    assert max(len(chart) for chart in charts()) < 25_000


def test_every_reference_inside_a_chart_is_resolved():
    for chart in charts():
        wanted = {*re.findall(r"url\(#([^)]+)\)", chart), *re.findall(r'href="#([^"]+)"', chart)}
        assert wanted <= set(re.findall(r'\bid="([^"]+)"', chart))


def build(*parts):
    return report.page(f"Title {ATTACK}", *parts)


def test_whatever_text_comes_in_stays_text():
    page = build(
        report.verdict(ATTACK, "good", ATTACK, ATTACK),
        report.section(
            ATTACK, report.subsection(ATTACK, report.paragraph(ATTACK), report.paragraph(ATTACK, note=True))
        ),
        report.table((ATTACK, ATTACK), [[ATTACK, report.code(ATTACK)]], numbers=[1]),
        report.figure(charts()[0], ATTACK),
        report.grid([report.texts({ATTACK: ATTACK})]),
        report.join([ATTACK, Markup("<br>")], ATTACK),
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 18


def test_a_page_needs_nothing_from_elsewhere():
    page = build(*(report.figure(chart) for chart in charts()))
    assert page.startswith("<!doctype html>")
    addresses = [one for one in re.findall(r"https?://[^\"]*", page) if not one.startswith("http://www.w3.org/")]
    assert addresses == []
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|src=", page)
    assert "prefers-color-scheme: dark" in page


def test_a_page_too_large_for_the_interface_is_refused():
    with pytest.raises(ValueError, match="at most 1000000 are shown"):
        build(report.paragraph("x" * report.MAX_BYTES))


def test_numbers_stand_right_and_rows_have_heads():
    table = report.table(("", "Loss"), [["Baseline", "1.0"]], numbers=[1])
    assert '<th>Baseline</th><td class="number">1.0</td>' in table


def test_markdown_cells_stay_cells():
    table = report.markdown_table(("a", "b"), [["x|y", "<b>`1`\n2"]])
    assert table == "| a | b |\n| --- | --- |\n| x\\|y | &lt;b&gt;\\`1\\` 2 |\n"
