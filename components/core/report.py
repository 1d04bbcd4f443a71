"""Report pages: one self-contained HTML file made of escaped text, tables and inline SVG.

KFP shows a report in a frame that may not reach anything, so that a page brings its style along and needs
no script, font or image from elsewhere. Everything is `Markup`: plain strings are escaped where they enter,
so that what a model generated stays text. The pages hold no time, host or path, and the same facts give the
same bytes. Charts are in `core/charts`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from markupsafe import Markup, escape

MAX_BYTES = 1_000_000
"""Largest page that the KFP UI shows comfortably."""

Tone = Literal["good", "bad", "plain"]

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --grid: #d8dee4; --soft: #f5f7f9;
  --first: #6a7178; --second: #1664b0; --third: #b3530a; --good: #1a7f37; --bad: #b42318; }
@media screen and (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e4e8ec; --muted: #9aa5b0; --grid: #343b42; --soft: #1c2126;
  --first: #a3adb7; --second: #6cb2f5; --third: #f0a04b; --good: #4ac26b; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 14px; }
h2 { font-size: 17px; margin: 36px 0 8px; padding-top: 14px; border-top: 1px solid var(--grid); }
h3 { font-size: 14px; margin: 20px 0 4px; }
p { margin: 6px 0; max-width: 78ch; }
.note, figcaption, caption { color: var(--muted); font-size: 13px; text-align: left; }
.verdict { display: flex; gap: 16px; align-items: baseline; padding: 14px 18px; border-radius: 6px;
  background: var(--soft); border-left: 5px solid var(--muted); }
.verdict { margin-bottom: 14px; } .verdict p { margin: 0; max-width: none; } .verdict p + p { margin-top: 4px; }
.verdict strong { font-size: 20px; letter-spacing: .04em; }
.good { border-color: var(--good); } .good strong { color: var(--good); }
.bad { border-color: var(--bad); } .bad strong { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 8px 0; }
th, td { padding: 5px 14px 5px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
.number:last-child { padding-right: 0; }
thead th { color: var(--muted); font-weight: 600; font-size: 13px; vertical-align: bottom; }
tbody th { font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
tbody .number { white-space: nowrap; }
code { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
figure { margin: 12px 0; min-width: 0; max-width: 760px; }
svg { display: block; width: 100%; height: auto; font-family: inherit; stroke-linejoin: round; }
.grid { display: grid; gap: 8px 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }
.grid figure { max-width: 460px; }
.texts { display: grid; gap: 8px; grid-template-columns: repeat(auto-fit, minmax(max(230px, 40%), 1fr)); }
.texts div { background: var(--soft); border-radius: 6px; padding: 8px 12px; min-width: 0; }
.texts b { display: block; font-size: 12px; color: var(--muted); font-weight: 600; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13.5px; margin: 2px 0; unicode-bidi: isolate; }
@media print { main { max-width: none; padding: 0; } h2, figure, .texts, tr { break-inside: avoid; } }
@media (max-width: 640px) { main { padding: 16px 14px 32px; } .verdict { display: block; }
  th, td { padding-right: 8px; } table { font-size: 12.5px; } thead th { font-size: 12px; } }
"""


def page(title: str, *parts: Markup) -> str:
    """A whole document.

    Raises:
        ValueError: the page is larger than MAX_BYTES: show fewer rows, points or generations.
    """
    text = Markup(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>{}</title>\n<style>{}</style>\n</head>\n<body><main>\n<h1>{}</h1>\n{}\n</main></body>\n</html>\n"
    ).format(title, Markup(STYLE), title, join(parts, "\n"))
    if (size := len(text.encode())) > MAX_BYTES:
        raise ValueError(f"report {title!r}: {size} bytes, and at most {MAX_BYTES} are shown; show fewer generations")
    return str(text)


def join(parts: Iterable[Markup | str], between: Markup | str = "") -> Markup:
    """Parts one after the other; plain strings are escaped, those between as well."""
    return escape(between).join(parts)


def verdict(word: str, tone: Tone, *sentences: str) -> Markup:
    """The answer, on top of everything else; what comes after the first sentence is set smaller."""
    told = join(paragraph(sentence, note=number > 0) for number, sentence in enumerate(sentences))
    return Markup('<div class="verdict {}"><strong>{}</strong><div>{}</div></div>').format(tone, word, told)


def section(heading: str, *parts: Markup) -> Markup:
    """A heading and what belongs to it."""
    return Markup("<section>\n<h2>{}</h2>\n{}\n</section>").format(heading, join(parts, "\n"))


def subsection(heading: str, *parts: Markup) -> Markup:
    """A lesser heading and what belongs to it."""
    return Markup("<h3>{}</h3>\n{}").format(heading, join(parts, "\n"))


def paragraph(text: str, note: bool = False) -> Markup:
    """A paragraph; a note is set smaller."""
    return Markup('<p class="note">{}</p>' if note else "<p>{}</p>").format(text)


def code(text: str) -> Markup:
    """Text in a fixed-width face: a hash, an option's value."""
    return Markup("<code>{}</code>").format(text)


def table(header: Sequence[str], rows: Sequence[Sequence[Markup | str]], numbers: Iterable[int] = ()) -> Markup:
    """A table whose first column names the rows; `numbers` are the columns to set flush right."""
    right = set(numbers)

    def cell(column: int, content: Markup | str, tag: str) -> Markup:
        kind = Markup(' class="number"') if column in right else Markup("")
        return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), kind, content)

    head = join(cell(column, name, "th") for column, name in enumerate(header))
    body = join(
        (
            Markup("<tr>{}</tr>").format(join(cell(n, item, "td" if n else "th") for n, item in enumerate(row)))
            for row in rows
        ),
        "\n",
    )
    return Markup(
        '<div class="scroll"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody></table></div>'
    ).format(head, body)


def figure(chart: Markup, caption: str = "") -> Markup:
    """A chart and what it says."""
    told = Markup("<figcaption>{}</figcaption>").format(caption) if caption else Markup("")
    return Markup("<figure>{}{}</figure>").format(chart, told)


def grid(parts: Iterable[Markup]) -> Markup:
    """Parts side by side where the window is wide enough."""
    return Markup('<div class="grid">{}</div>').format(join(parts))


def texts(named: Mapping[str, str]) -> Markup:
    """Passages of any text side by side, white space kept."""
    cells = (Markup('<div><b>{}</b><p class="text">{}</p></div>').format(name, text) for name, text in named.items())
    return Markup('<div class="texts">{}</div>').format(join(cells))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; what would end a cell or start HTML is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(markdown_text(str(cell)) for cell in line) + " |" for line in lines) + "\n"


def markdown_text(text: str) -> str:
    """Text as Markdown shows it literally, on one line: no HTML, no cell border, no code span."""
    return " ".join(str(escape(text)).replace("|", "\\|").replace("`", "\\`").split())
