"""The HTML of a page: a template and its parts, with all text escaped."""

import html
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from adl_dist.report.curves import STYLE

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{head}
</header>
<nav>{contents}</nav>
<main>
{sections}
</main>
<footer>{foot}</footer>
</body>
</html>
"""
CSS = """\
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; color: #1f2328; background: white;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid #d0d7de; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; overflow-wrap: anywhere; }
nav { margin-top: .8rem; font-size: .9rem; }
nav a { margin-right: 1rem; color: #0550ae; white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #eaeef2; vertical-align: top; }
th { font-weight: 600; border-bottom-color: #8c959f; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { overflow-wrap: anywhere; }
figure { margin: .6rem 0; }
figure svg { height: auto; max-width: 100%; }
figure.wide svg { max-width: none; }
figcaption, .quiet, footer { color: #57606a; font-size: .87rem; }
.missing { color: #57606a; font-style: italic; }
.bad { color: #a40e26; }
.good { color: #1a7f37; }
.bar { display: inline-block; height: .7em; background: #56B4E9; margin-left: .6em; }
.room { display: inline-block; width: 9rem; text-align: left; }
.number { display: inline-block; min-width: 5.5rem; text-align: right; }
pre { background: #f6f8fa; padding: .7rem; overflow-x: auto; font-size: .82rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
code { font-size: .88em; background: #f6f8fa; padding: .1em .3em; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; border-top: 1px solid #d0d7de; padding-top: .6rem; }
@media print { nav { display: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
NOT_REFERRED = re.compile(r' id="([^"]*)"')
REFERRED = re.compile(r'(?:url\(#|href="#)([^)"]*)')


class Html(str):
    """HTML text, not to be escaped again in a page."""

    __slots__ = ()


class Section(NamedTuple):
    """A part of a page, with its heading in the table of contents."""

    heading: str
    parts: Sequence[Html]


def escaped(text: object) -> Html:
    """Return ``text`` as HTML: unchanged if it is HTML already."""
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def page(title: str, head: Sequence[Html], sections: Sequence[Section], foot: str) -> str:
    """Return the page."""
    anchors = [re.sub(r"\W+", "-", section.heading.lower()) for section in sections]
    contents = " ".join(
        f'<a href="#{anchor}">{escaped(section.heading)}</a>' for anchor, section in zip(anchors, sections, strict=True)
    )
    bodies = [
        f'<section id="{anchor}">\n<h2>{escaped(section.heading)}</h2>\n' + "\n".join(section.parts) + "\n</section>"
        for anchor, section in zip(anchors, sections, strict=True)
    ]
    return PAGE.format(
        title=escaped(title),
        style=CSS,
        head="\n".join(head),
        contents=contents,
        sections="\n".join(bodies),
        foot=escaped(foot),
    )


def paragraph(text: object, kind: str = "") -> Html:
    """Return a paragraph: plain, ``quiet``, ``missing``, ``bad`` or ``good``."""
    return Html(f'<p class="{kind}">{escaped(text)}</p>' if kind else f"<p>{escaped(text)}</p>")


def missing(text: str) -> Html:
    """Return the line about a missing record, and how to get it."""
    return paragraph(f"Not recorded: {text}", "missing")


def heading(text: str) -> Html:
    """Return a heading within a section."""
    return Html(f"<h3>{escaped(text)}</h3>")


def verbatim(text: str) -> Html:
    """Return text with its line breaks and spaces."""
    return Html(f"<pre>{escaped(text)}</pre>")


def table(rows: Sequence[Sequence[object]], *, text_columns: Sequence[int] = ()) -> Html:
    """Return a table with a head row and left-aligned ``text_columns``.

    The first column is aligned at the left as well.
    """
    lines = []
    for number, row in enumerate(rows):
        kind = "td" if number else "th"
        kinds = [f'{kind} class="text"' if place in text_columns else kind for place in range(len(row))]
        cells = (f"<{opened}>{escaped(cell)}</{kind}>" for opened, cell in zip(kinds, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return Html('<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>")


def bar(text: str, share: float) -> Html:
    """Return a table cell with ``text`` and a bar of relative width."""
    width = 9 * min(max(share, 0.0), 1.0)
    drawn = f'<span class="room"><span class="bar" style="width:{width:.2f}rem"></span></span>'
    return Html(f'<span class="number">{escaped(text)}</span>{drawn}')


def figure(drawn: Figure, caption: str, *, name: str, is_wide: bool = False) -> Html:
    """Return a figure as SVG with a caption, and ids that are unique by name.

    ``is_wide``: it keeps its size, for a part that is scrolled; others shrink to the width of the page.
    """
    file = io.StringIO()
    # No random ids, no dates; letters as shapes, which look the same everywhere.
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "path"}):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    svg = METADATA.sub("", text[text.index("<svg") :])
    referred = set(REFERRED.findall(svg))
    svg = NOT_REFERRED.sub(lambda found: found[0] if found[1] in referred else "", svg)
    for place in ('id="', 'href="#', "url(#"):
        svg = svg.replace(place, f"{place}{name}-")
    label = html.escape(caption, quote=True)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    kind = ' class="wide"' if is_wide else ""
    return Html(f"<figure{kind}>{svg}<figcaption>{escaped(caption)}</figcaption></figure>")


def scrolled(parts: Sequence[Html]) -> Html:
    """Return ``parts`` in a wide block with one common scroll bar."""
    return Html('<div class="scroll">' + "\n".join(parts) + "</div>")
