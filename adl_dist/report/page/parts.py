"""The parts of a page: text, tables, charts and timelines, with all numbers that the template draws."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from adl_dist.report.spans import BOXES, SMALL, STYLES, arrows
from adl_dist.report.timeline import SHARES, Timeline
from adl_dist.schedule.actions import Op
from adl_dist.schedule.timing import Span

MOST_POINTS = 600  # of a curve; more cannot be seen
MOST_DOTS = 40  # points of a curve that has each marked
NUM_COLOURS, NUM_DASHES = 6, 3
LANE, BOX, STRIP = 36, 24, 5  # pixels of a timeline
CSS = {op: op.name.lower().replace("_", "-") for op in BOXES}


@dataclass(frozen=True)
class Text:
    """A paragraph: plain, ``quiet``, ``bad`` or ``good``."""

    text: str
    css: str = ""
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Verbatim:
    """Text with its line breaks and spaces."""

    text: str
    kind: ClassVar[str] = "verbatim"


@dataclass(frozen=True)
class Missing:
    """A record that the run does not have, and how to get it."""

    text: str
    kind: ClassVar[str] = "missing"


class Cell(NamedTuple):
    """A cell of a table, with a bar of a width in percent."""

    text: str
    bar: float = 0.0


@dataclass(frozen=True)
class Table:
    """A table; the cells of the first column and of ``texts`` are aligned at the left."""

    head: Sequence[tuple[str, str]]  # text and class
    rows: Sequence[Sequence[tuple[Cell, str]]]
    kind: ClassVar[str] = "table"


class Series(NamedTuple):
    """One curve of a chart: SVG paths in a square of 1000."""

    name: str
    css: str
    line: str
    dots: str = ""
    band: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves over a common axis; ticks are a place in percent and a text."""

    title: str
    x_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    legend: Sequence[tuple[str, str]]  # class and text


@dataclass(frozen=True)
class Charts:
    """Charts side by side, with a common caption."""

    charts: Sequence[Chart]
    caption: str
    kind: ClassVar[str] = "charts"


class Segment(NamedTuple):
    """A part of a bar, with its width in percent."""

    css: str
    width: float
    title: str


@dataclass(frozen=True)
class Bars:
    """Bars of segments, at most 100 % long together."""

    bars: Sequence[tuple[str, Sequence[Segment]]]  # with a label
    legend: Sequence[tuple[str, str]]  # class and text
    caption: str
    kind: ClassVar[str] = "bars"


class Box(NamedTuple):
    """A rectangle of a timeline; x and width in percent, y and height in pixels."""

    css: str
    x: float
    y: float
    width: float
    height: float
    text: str
    title: str


class Line(NamedTuple):
    """An arrow of a timeline, in the same units."""

    css: str
    x1: float
    y1: float
    x2: float
    y2: float


class Lanes(NamedTuple):
    """The lanes of all stages over a part of the time."""

    title: str
    boxes: Sequence[Box]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Timelines:
    """One or more drawings of lanes over a common axis of time."""

    lanes: Sequence[Lanes]
    tops: Sequence[float]  # of each lane
    height: float
    ticks: Sequence[tuple[float, str]]
    x_label: str
    legend: Sequence[tuple[str, str]]
    caption: str
    kind: ClassVar[str] = "timelines"


Part = Text | Verbatim | Missing | Table | Charts | Bars | Timelines


def table(rows: Sequence[Sequence[Cell | object]], texts: Sequence[int] = ()) -> Table:
    """Return a table of ``rows``, the first of which is the head."""
    css = ["left" if place in (0, *texts) else "" for place in range(len(rows[0]))]
    cells = [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows[1:]]
    return Table(
        head=[(str(text), kind) for text, kind in zip(rows[0], css, strict=True)],
        rows=[list(zip(row, css, strict=True)) for row in cells],
    )


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return up to ``most`` round numbers from ``low`` to ``high``."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Curve(NamedTuple):
    """The values of one curve, before they have places in a chart."""

    name: str
    css: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()  # x, lowest, highest


def chart(
    title: str, x_label: str, curves: Sequence[Curve], *, from_zero: bool = False, top: float | None = None
) -> Chart:
    """Return a chart of ``curves`` that leaves out a few values far above all others.

    Args:
        title: name of the values.
        x_label: name of the axis.
        curves: the curves, finite.
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

    def place(x: float, y: float) -> tuple[float, float]:
        return 1000 * _part(x, x_range), 1000 * (1 - _part(y, y_range))

    return Chart(
        title=title,
        x_label=x_label,
        x_range=x_range,
        y_range=y_range,
        x_ticks=[(100 * _part(t, x_range), f"{t:,.6g}") for t in nice_ticks(*x_range)],
        y_ticks=[(100 * (1 - _part(t, y_range)), f"{t:,.6g}") for t in nice_ticks(*y_range)],
        series=[_series(curve, place) for curve in curves],
        legend=[(curve.css, curve.name) for curve in curves] if len(curves) > 1 else [],
    )


def _part(value: float, bounds: tuple[float, float]) -> float:
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def _series(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> Series:
    places = [place(*point) for point in curve.points]
    lows, highs = ([place(end[0], end[side]) for end in curve.band] for side in (1, 2))
    return Series(
        curve.name,
        curve.css,
        line=_path("L", places),
        dots=f"{_path('h0M', places)}h0" if 0 < len(places) <= MOST_DOTS else "",
        band=_path("L", [*lows, *reversed(highs)]),
    )


def _path(between: str, places: Sequence[tuple[float, float]]) -> str:
    return "M" + between.join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""


def colour(number: int) -> str:
    """Return the class of the colour and dashes of one of many curves."""
    return f"c{number % NUM_COLOURS} d{number // NUM_COLOURS % NUM_DASHES}"


def lanes(title: str, spans: Sequence[Span], length: float, staleness: Callable[[Span], int | None]) -> Lanes:
    """Return the drawing of ``spans``, of which ``length`` units of time fill the width."""
    by_begin = sorted(spans, key=lambda span: span.action.op is Op.UPDATE)  # updates are drawn over backwards
    boxes = [_box(span, length, staleness(span)) for span in by_begin if span.action.op in (*BOXES, *SMALL)]
    drawn = [span for span in spans if span.action.op in BOXES]
    lines = []
    for tail, head, is_act in arrows(drawn, [(span.stage, span.action) for span in spans]):
        down = head.stage > tail.stage
        css = "act" if is_act else "grad"
        y1, y2 = _top(tail.stage) + BOX * down, _top(head.stage) + BOX * (not down)
        lines.append(Line(css, _percent(tail.end, length), y1, _percent(head.start, length), y2))
    return Lanes(title, [box for box in boxes if box is not None], lines)


def _box(span: Span, length: float, stale: int | None) -> Box | None:
    op, number = span.action
    x, width = _percent(span.start, length), _percent(span.end - span.start, length)
    if op in SMALL:
        top = _top(span.stage) + BOX - STRIP
        return Box("small", x, top, width, STRIP, "", op.name.replace("_", " ").lower()) if width else None
    name = "update" if op is Op.UPDATE else STYLES[op][2]
    behind = "" if stale is None else f", staleness {stale}"
    title = f"stage {span.stage}: {name} {number}, {span.end - span.start:.3g}{behind}"
    if op is Op.UPDATE and not width:
        x, width = x - 0.25, 0.25  # it covers the end of its backward
    text = f"U{number}" if op is Op.UPDATE else str(number)
    return Box(CSS[op], x, _top(span.stage), width, BOX, text, title)


def timelines(drawn: Sequence[Lanes], num_stages: int, length: float, x_label: str, caption: str) -> Timelines:
    """Return drawings over one axis that is ``length`` units of time long."""
    found = {box.css for one in drawn for box in one.boxes}
    legend = [(CSS[op], label) for op, (_, _, label) in STYLES.items() if CSS[op] in found]
    legend += [(css, label) for css, label in (("update", "update"), ("small", "load, send")) if css in found]
    return Timelines(
        lanes=drawn,
        tops=[_top(k) for k in range(num_stages)],
        height=num_stages * LANE,
        ticks=[(_percent(t, length), f"{t:g}") for t in nice_ticks(0.0, length, most=12)],
        x_label=x_label,
        legend=[*legend, ("lane", "idle")],
        caption=caption,
    )


def _percent(time: float, length: float) -> float:
    return round(100 * time / length, 3)


def _top(stage: int) -> float:
    return stage * LANE + (LANE - BOX) / 2


def shares(timeline: Timeline, caption: str) -> Bars:
    """Return each stage's time by activity, as bars that add up to 100 %."""
    spent = [timeline.shares(k) for k in range(len(timeline.stages))]
    css = {share: share.replace(", ", "-") for share in SHARES}
    bars = [
        (f"stage {k}", [Segment(css[name], 100 * part, f"{name} {part:.1%}") for name, part in of_stage.items()])
        for k, of_stage in enumerate(spent)
    ]
    legend = [(css[name], name) for name in SHARES if any(of_stage[name] > 5e-4 for of_stage in spent)]
    return Bars(bars, legend, caption)
