"""The parts of a page, each a macro of the template with all its numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from adl_dist.report.runs import Point
from adl_dist.report.timeline import BOXES, SHARES, SMALL, STYLES, Timeline, arrows
from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.timing import Span

Part = dict[str, Any]  # ``kind``, the name of the macro, and its variables
Bar = tuple[str, Sequence[tuple[str, float, str]]]  # label, and segments: class, width in percent, text
VERBATIM, MISSING = "verbatim", "missing"
AXES = {"epoch": "epoch", "seconds": "seconds of training"}  # of curves, by the attribute of points

MOST_POINTS = 600  # of a curve; more cannot be seen
MOST_DOTS = 40  # points of a curve that has each marked
NUM_COLOURS, NUM_DASHES = 6, 3
LANE, BOX, STRIP = 36, 24, 5  # pixels of a timeline
CSS = {op: op.name.lower().replace("_", "-") for op in BOXES}


def text(content: str, css: str = "") -> Part:
    """Return a paragraph of class ``css``, or of kind VERBATIM or MISSING."""
    return {"kind": css if css in (VERBATIM, MISSING) else "text", "text": content, "css": css}


def bar(content: str, percent: float) -> Part:
    """Return a table cell with a bar of ``percent`` width behind it."""
    return {"text": content, "bar": percent}


def table(rows: Sequence[Sequence[object]], texts: Sequence[int] = ()) -> Part:
    """Return a table; its first row is the head.

    Cells of the first column and of ``texts`` are aligned at the left.
    """
    css = ["left" if place in (0, *texts) else "" for place in range(len(rows[0]))]
    cells = [[cell if isinstance(cell, dict) else {"text": str(cell), "bar": 0.0} for cell in row] for row in rows]
    return {"kind": "table", "head": cells[0], "rows": cells[1:], "css": css}


class Curve(NamedTuple):
    """One curve of a chart, with finite values."""

    name: str
    css: str
    points: Sequence[tuple[float, float]]


def colour(number: int) -> str:
    """Return the CSS classes for colour and dashes of curve ``number``."""
    return f"c{number % NUM_COLOURS} d{number // NUM_COLOURS % NUM_DASHES}"


def places(points: Sequence[Point], x: str = "epoch", scale: float = 1.0) -> list[tuple[float, float]]:
    """Return (``x``, scaled value) of ``points``, thinned out in long curves."""
    return [(getattr(point, x), scale * point.value) for point in points[:: max(1, len(points) // MOST_POINTS)]]


def charts(drawn: Sequence[Part], caption: str, otherwise: str = "") -> Part:
    """Return charts side by side or, without any, the text ``otherwise``."""
    return {"kind": "charts", "charts": drawn, "caption": caption} if drawn else text(otherwise, MISSING)


def chart(
    title: str, x_label: str, curves: Sequence[Curve], *, from_zero: bool = False, top: float | None = None
) -> Part:
    """Return a chart in a 1000 x 1000 square; it clips a few high outliers.

    Args:
        title: name of the values.
        x_label: name of the axis.
        curves: the curves.
        from_zero: whether the axis of the values begins at 0.
        top: the end of the axis of the values.
    """
    xs = [x for curve in curves for x, _ in curve.points] or [0.0]
    ys = sorted(y for curve in curves for _, y in curve.points) or [0.0]
    low, high = (0.0 if from_zero else ys[0]), ys[-1]
    usual = ys[int(0.98 * len(ys))] if len(ys) > 20 else high
    if high - low > 2 * (usual - low) > 0:
        high = usual + 0.2 * (usual - low)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    y_range = (low if from_zero else low - margin, high + margin if top is None else top)
    x_range = (min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1.0)

    def part(value: float, bounds: tuple[float, float]) -> float:
        return (value - bounds[0]) / (bounds[1] - bounds[0])

    def paths(curve: Curve) -> Part:
        points = [f"{1000 * part(x, x_range):.1f} {1000 * (1 - part(y, y_range)):.1f}" for x, y in curve.points]
        dots = f"M{'h0M'.join(points)}h0" if len(points) <= MOST_DOTS else ""
        return {"name": curve.name, "css": curve.css, "line": f"M{'L'.join(points)}", "dots": dots}

    return {
        "title": title,
        "x_label": x_label,
        "x_range": x_range,
        "y_range": y_range,
        "x_ticks": [(100 * part(t, x_range), f"{t:,.6g}") for t in nice_ticks(*x_range)],
        "y_ticks": [(100 * (1 - part(t, y_range)), f"{t:,.6g}") for t in nice_ticks(*y_range)],
        "series": list(map(paths, curves)),
        "legend": [(curve.css, curve.name) for curve in curves] if len(curves) > 1 else [],
    }


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return up to ``most`` round numbers from ``low`` to ``high``."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bars(drawn: Sequence[Bar], legend: Sequence[tuple[str, str]], caption: str) -> Part:
    """Return bars, each of segments that add up to at most 100 %."""
    return {"kind": "bars", "bars": drawn, "legend": legend, "caption": caption}


def shares(timeline: Timeline, caption: str) -> Part:
    """Return each stage's time by activity, as bars that add up to 100 %."""
    spent = [timeline.shares(k) for k in range(len(timeline.stages))]
    css = {share: share.replace(", ", "-") for share in SHARES}
    drawn = [
        (f"stage {k}", [(css[name], 100 * part, f"{name} {part:.1%}") for name, part in of_stage.items()])
        for k, of_stage in enumerate(spent)
    ]
    legend = [(css[name], name) for name in SHARES if any(of_stage[name] > 5e-4 for of_stage in spent)]
    return bars(drawn, legend, caption)


def lanes(
    title: str,
    spans: Sequence[Span],
    length: float,
    staleness: Callable[[Span], int | None],
    messages: Sequence[tuple[int, Action]] | None = None,
) -> Part:
    """Return a drawing of ``spans`` on an axis of ``length`` units of time.

    Boxes have a class, x in percent, y in pixels, width, height, a text and a title; arrows a class and two places.
    ``messages`` are the receiving actions by their stage, by default those among ``spans``.
    """
    messages = [(span.stage, span.action) for span in spans] if messages is None else messages
    ordered = sorted(spans, key=lambda span: span.action.op is Op.UPDATE)  # updates are drawn over backwards
    boxes = [_box(span, length, staleness(span)) for span in ordered if span.action.op in (*BOXES, *SMALL)]
    drawn = [span for span in spans if span.action.op in BOXES]
    lines = []
    for tail, head, is_act in arrows(drawn, messages):
        down = head.stage > tail.stage
        begin = _percent(tail.end, length), _top(tail.stage) + BOX * down
        end = _percent(head.start, length), _top(head.stage) + BOX * (not down)
        lines.append(("act" if is_act else "grad", *begin, *end))
    return {"title": title, "boxes": [box for box in boxes if box[3]], "lines": lines}


def _box(span: Span, length: float, stale: int | None) -> tuple[str, float, float, float, float, str, str]:
    op, number, *_ = span.action
    x, y, width = _percent(span.start, length), _top(span.stage), _percent(span.end - span.start, length)
    if op in SMALL:
        return "small", x, y + BOX - STRIP, width, STRIP, "", op.name.replace("_", " ").lower()
    name = "update" if op is Op.UPDATE else STYLES[op][2]
    title = f"stage {span.stage}: {name} {number}, {span.end - span.start:.3g}"
    title += "" if stale is None else f", staleness {stale}"
    if op is Op.UPDATE and not width:
        x, width = x - 0.25, 0.25  # it covers the end of its backward
    return CSS[op], x, y, width, BOX, f"U{number}" if op is Op.UPDATE else str(number), title


def timelines(drawn: Sequence[Part], num_stages: int, length: float, x_label: str, caption: str) -> Part:
    """Return several :func:`lanes` on one axis of ``length`` units of time."""
    found = {box[0] for one in drawn for box in one["boxes"]}
    legend = {CSS[op]: label for op, (_, _, label) in STYLES.items()} | {"update": "update", "small": "load, send"}
    return {
        "kind": "timelines",
        "lanes": drawn,
        "tops": [_top(k) for k in range(num_stages)],
        "height": num_stages * LANE,
        "ticks": [(_percent(t, length), f"{t:g}") for t in nice_ticks(0.0, length, most=100)],
        "x_label": x_label,
        "legend": [*((css, label) for css, label in legend.items() if css in found), ("lane", "idle")],
        "caption": caption,
    }


def _percent(time: float, length: float) -> float:
    return round(100 * time / length, 3)


def _top(stage: int) -> float:
    return stage * LANE + (LANE - BOX) / 2
