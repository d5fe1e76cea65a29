"""The HTML of a page: its frame, tables and figures. All text is escaped here."""

import io
from collections.abc import Iterable, Sequence
from html import escape

import matplotlib
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee4; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #d8dee4; }
.wide { overflow-x: auto; }
.wide svg { display: block; max-width: 100%; height: auto; }
.scroll svg { max-width: none; }
.about, .missing { color: #57606a; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 13px; }
"""


def document(title: str, about: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return the page; each of ``sections`` has a heading, which is text, and HTML."""
    parts = [f"<section><h2>{escape(heading)}</h2>\n{body}\n</section>" for heading, body in sections]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f'<h1>{escape(title)}</h1>\n<p class="about">{escape(about)}</p>\n' + "\n".join(parts)
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return a table; the first row is its head."""
    first, *others = ["".join(f"<CELL>{escape(str(cell))}</CELL>" for cell in row) for row in rows]
    lines = [first.replace("CELL>", "th>"), *(line.replace("CELL>", "td>") for line in others)]
    return '<div class="wide"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def text(words: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(words)}</p>"


def missing(words: str) -> str:
    """Return a paragraph that says what the run has not recorded."""
    return f'<p class="missing">{escape(words)}</p>'


def verbatim(words: str, summary: str | None = None) -> str:
    """Return text as it is; with a ``summary`` it is folded away behind it."""
    body = f"<pre>{escape(words)}</pre>"
    return body if summary is None else f"<details><summary>{escape(summary)}</summary>{body}</details>"


def inline(figure: Figure, *, scrolls: bool = False) -> str:
    """Return a figure as SVG within the page; ``scrolls``: at its own width, however wide that is."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "adl_dist", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return f'<div class="wide{" scroll" * scrolls}">{svg[svg.index("<svg") :]}</div>'
