"""A schedule as a picture: a lane for each stage, boxes for its work, arrows for what it sends.

To be imported late: matplotlib takes half a second.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from adl_dist.errors import ConfigError
from adl_dist.report.files import check_out, write_atomically
from adl_dist.schedule.actions import BACKWARDS, LINKS, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.table import figures, tied_figures, title
from adl_dist.schedule.timing import Costs, Span, in_processes, simulate, ticks

MOST_TICKS = 400  # more cannot be read

# Okabe and Ito's colours, which colour-blind people tell apart: face, text.
STYLES = {
    Op.FORWARD: ("#56B4E9", "black", "forward"),
    Op.FORWARD_ONLY: ("#C9E6F7", "black", "forward, input kept only"),
    Op.RECOMPUTE: ("#F0E442", "black", "forward again"),
    Op.BACKWARD: ("#E69F00", "black", "backward"),
    Op.BACKWARD_INPUT: ("#E69F00", "black", "I: backward, without gradients of weights"),
    Op.BACKWARD_WEIGHT: ("#009E73", "white", "WG: gradients of weights"),
    Op.LEARN: ("#CC79A7", "black", "the head learns"),
}
DASHES = (0, (4, 1.6))


@dataclass(frozen=True)
class Theme:
    """The colours of a picture but for the boxes', which are the same on every background."""

    background: str
    text: str
    small_text: str
    lane: str
    grid: str
    update: tuple[str, str]  # face, text
    act: str
    grad: str
    small: str


LIGHT = Theme("white", "black", "#555555", "#EFEFEF", "#C8C8C8", ("#333333", "white"), "#0072B2", "#D55E00", "#8C8C8C")
DARK = Theme(
    "#0D1117", "#E6EDF3", "#A8B1BB", "#1F262E", "#3A434D", ("#D7DDE3", "black"), "#56B4E9", "#F28E45", "#8C8C8C"
)

# In a tick a backward is drawn as wide as two forwards, which is about what it costs.
PARTS = {Op.FORWARD: 1, Op.FORWARD_ONLY: 1, Op.RECOMPUTE: 1, Op.BACKWARD: 2, Op.LEARN: 1}
FORWARDS = (Op.FORWARD, Op.FORWARD_ONLY)
UPDATES = (Op.UPDATE, Op.UPDATE_TIED)
SMALL = (Op.LOAD, *LINKS)  # drawn of what was measured

# In inches.
LANE, BOX = 0.95, 0.5
UPDATE = 0.15
LEFT, RIGHT, TOP, BOTTOM = 1.05, 0.2, 0.65, 0.9
NARROWEST = 6.5  # what the words need
LETTER = 0.0092  # width of a digit per point of its size
WIDEST = 300.0
MEASURED_INCHES = 16.0  # of a measured picture: what does not fit is left out
STRIP = 0.1  # height of what a stage does for messages


def draw(
    pipeline: Pipeline, path: Path, *, num_micro_batches: int, costs: Costs | None = None, theme: Theme = LIGHT
) -> None:
    """Draw a segment into a file, the same bytes for the same schedule; the axis counts ``costs`` or, without, ticks.

    Raises:
        ConfigError: another kind of file, too many ticks, or a place that cannot be written.
    """
    check_out(path)
    # No random ids, no dates; letters as shapes, which look the same everywhere.
    with rc_context({"svg.hashsalt": "adl_dist", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure = picture(pipeline, num_micro_batches=num_micro_batches, costs=costs, theme=theme)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
        dpi = min(200.0, 30_000 / figure.get_figwidth())
        try:
            with write_atomically(path) as unfinished:
                figure.savefig(unfinished, dpi=dpi, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another place") from error


def picture(
    pipeline: Pipeline,
    *,
    num_micro_batches: int,
    costs: Costs | None = None,
    theme: Theme = LIGHT,
    unit: str = "unit of the costs",
) -> Figure:
    """Return the picture; see :func:`draw`. ``unit``: that of the ``costs``."""
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    table = ticks(lists, turns=turns)
    num_ticks = max((max(row) + 1 for row in table if row), default=0)
    if num_ticks > MOST_TICKS:
        fewer = f"lower --micro-batches, which is {num_micro_batches}"
        raise ConfigError(f"a picture of {num_ticks} ticks cannot be read; expected at most {MOST_TICKS}: {fewer}")
    spans = _spans_of_ticks(table) if costs is None else simulate(lists, costs, turns=turns)
    boxes = [span for span in spans if span.action.op in (*STYLES, Op.UPDATE)]
    length = max(box.end for box in boxes)
    inches = min(scale(boxes), WIDEST / length)
    name, facts = title(pipeline, num_micro_batches=num_micro_batches).rsplit(": ", 1)
    shows_staleness = any(f.staleness_max for f in figures(pipeline))

    def staleness(box: Span) -> int | None:
        is_shown = shows_staleness and box.action.op in BACKWARDS
        return pipeline.staleness(box.stage, box.action.number) if is_shown else None

    figure, axes = _figure(pipeline, length * inches, shows_staleness, theme)
    _axis(axes, length, inches, num_ticks if costs is None else None, theme, unit=unit)
    _arrows(axes, lists, boxes, inches, theme)
    _boxes(axes, boxes, inches, staleness, theme)
    _legend(figure, pipeline, boxes, (name, facts), shows_staleness, theme)
    return figure


def measured_picture(
    pipeline: Pipeline,
    spans: Sequence[Span],
    *,
    staleness: Callable[[Span], int | None],
    unit: str,
    facts: str,
    inches: float | None = None,
    theme: Theme = LIGHT,
) -> Figure:
    """Return the picture of what stages did in a part of a run, in which all of them have ``spans``.

    ``staleness``: that of a backward; ``unit``: of the times; ``facts``: what the picture says of itself; ``inches``:
    how long a unit of time is, None: so that the usual forward has room for its number.
    """
    lists = [[span.action for span in spans if span.stage == k] for k in range(pipeline.num_stages)]
    begin = max(min(span.start for span in spans if span.stage == k) for k in range(pipeline.num_stages))
    end = min(max(span.end for span in spans if span.stage == k) for k in range(pipeline.num_stages))
    inches = inches or scale(spans)
    end = min(end, begin + MEASURED_INCHES / inches)
    shown = [
        span._replace(start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
        for span in spans
        if begin <= span.end and span.start <= end
    ]
    boxes = [span for span in shown if span.action.op in (*STYLES, Op.UPDATE)]
    shows_staleness = any(staleness(box) for box in boxes)
    figure, axes = _figure(pipeline, (end - begin) * inches, shows_staleness, theme)
    _axis(axes, end - begin, inches, None, theme, unit=unit)
    _arrows(axes, lists, boxes, inches, theme)
    for span in shown:
        if span.action.op in SMALL:
            corner = span.start * inches, _middle(span.stage) + BOX / 2 - STRIP
            axes.add_patch(Rectangle(corner, (span.end - span.start) * inches, STRIP, color=theme.small, linewidth=0))
    _boxes(axes, boxes, inches, lambda box: staleness(box) if shows_staleness else None, theme)
    name = title(pipeline, num_micro_batches=len(lists[0])).rsplit(": ", 1)[0]
    has_strips = any(span.end > span.start for span in shown if span.action.op in SMALL)
    also = [Patch(color=theme.small, label="load, send")] if has_strips else []
    _legend(figure, pipeline, boxes, (name, facts), shows_staleness, theme, also)
    return figure


def scale(boxes: Sequence[Span]) -> float:
    """Return the inches of a unit of time at which the usual forward has room for its number."""
    usual = median([box.end - box.start for box in boxes if box.action.op in FORWARDS])
    usual = usual or max(box.end for box in boxes) / len(boxes)
    largest = max(box.action.number for box in boxes if box.action.op in STYLES)
    return float(max(0.26, LETTER * 9 * len(str(largest)) + 0.1) / usual)


def _figure(pipeline: Pipeline, width: float, shows_staleness: bool, theme: Theme) -> tuple[Figure, Axes]:
    """Return an empty picture of so many inches, with a lane for each stage."""
    height = pipeline.num_stages * LANE
    size = (LEFT + max(width, NARROWEST) + RIGHT, TOP + height + BOTTOM)
    figure = Figure(figsize=size, facecolor=theme.background)
    wide, high = figure.get_size_inches()
    axes = figure.add_axes((LEFT / wide, BOTTOM / high, width / wide, height / high), facecolor=theme.background)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    _lanes(axes, pipeline, width, shows_staleness, theme)
    return figure, axes


def _boxes(
    axes: Axes, boxes: Sequence[Span], inches: float, staleness: Callable[[Span], int | None], theme: Theme
) -> None:
    updates = {(box.stage, box.start): box for box in boxes if box.action.op is Op.UPDATE}
    for box in boxes:
        _box(axes, box, inches, staleness(box), theme, update=updates.get((box.stage, box.end)))


def _spans_of_ticks(table: Sequence[dict[int, list[Action]]]) -> Iterator[Span]:
    in_ticks = [actions for row in table for actions in row.values()]
    if any(a.op is Op.BACKWARD_INPUT for actions in in_ticks for a in actions):
        yield from _spans_of_split_ticks(table, parts=1 + max(map(_num_behind_forward, in_ticks)))
        return
    replays, learns = (any(a.op is op for actions in in_ticks for a in actions) for op in (Op.RECOMPUTE, Op.LEARN))
    parts = 3 + replays + learns
    # A forward begins its tick.
    begins = {Op.RECOMPUTE: 1 / parts, Op.BACKWARD: (1 + replays) / parts, Op.LEARN: (parts - 1) / parts}
    for stage, row in enumerate(table):
        for tick, actions in row.items():
            end = float(tick)
            for action in actions:
                end = tick + begins[action.op] if action.op in begins else end
                start, end = end, end + PARTS.get(action.op, 0) / parts
                yield Span(stage, action, start, end)


def _num_behind_forward(actions: Sequence[Action]) -> int:
    return sum(a.op not in (*FORWARDS, *UPDATES) for a in actions)


def _spans_of_split_ticks(table: Sequence[dict[int, list[Action]]], *, parts: int) -> Iterator[Span]:
    """Yield the actions of each tick, all as long as each other: its forward, or room for it, and what follows."""
    for stage, row in enumerate(table):
        for tick, actions in row.items():
            end = tick + 1 / parts
            for action in actions:
                start = float(tick) if action.op in FORWARDS else end
                end = start if action.op in UPDATES else start + 1 / parts
                yield Span(stage, action, start, end)


def _middle(stage: int) -> float:
    return (stage + 0.5) * LANE


def _lanes(axes: Axes, pipeline: Pipeline, width: float, shows_staleness: bool, theme: Theme) -> None:
    for f in figures(pipeline):
        middle = _middle(f.stage)
        axes.add_patch(Rectangle((0, middle - BOX / 2), width, BOX, color=theme.lane, linewidth=0, zorder=0))
        labels = [f"delay {f.delay}", f"mean LoS {f.staleness_mean:.3g}"][: 1 + shows_staleness]
        if tied := [f"{copy.staleness_mean:.3g}" for copy in tied_figures(pipeline) if copy.stage == f.stage]:
            labels.append(f"tied LoS {'/'.join(tied)}")
        right: Any = {"ha": "right", "va": "center"}
        axes.text(-0.12, middle - 0.09 * len(labels), f"stage {f.stage}", fontsize=10, color=theme.text, **right)
        for i, text in enumerate(labels, start=1):
            y = middle - 0.09 * len(labels) + 0.18 * i
            axes.text(-0.12, y, text, fontsize=8, color=theme.small_text, **right)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.text)


def _axis(axes: Axes, length: float, inches: float, num_ticks: int | None, theme: Theme, unit: str) -> None:
    axes.tick_params(axis="x", colors=theme.text)
    if num_ticks is None:
        candidates = MaxNLocator(nbins=max(4, int(length * inches))).tick_values(0, length)
        places = [t for t in candidates if 0 <= t <= length + 1e-9]
        axes.set_xticks([t * inches for t in places], [f"{t:g}" for t in places], fontsize=9)
        axes.set_xlabel(f"time ({unit})", fontsize=9, labelpad=3, color=theme.text)
        return
    axes.set_xticks([(tick + 0.5) * inches for tick in range(num_ticks)], map(str, range(num_ticks)), fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("tick", fontsize=9, labelpad=3, color=theme.text)
    for tick in range(num_ticks + 1):
        axes.axvline(tick * inches, color=theme.grid, linewidth=0.6, zorder=0.5)


def _arrows(axes: Axes, lists: Sequence[Sequence[Action]], boxes: Sequence[Span], inches: float, theme: Theme) -> None:
    """Draw an arrow from the work that made a message to the work that needs it."""
    ends = (*FORWARDS, *BACKWARDS)
    made = {(box.stage, box.action.op in FORWARDS, box.action.number): box for box in boxes if box.action.op in ends}
    learning = {(box.stage, box.action.number): box for box in boxes if box.action.op is Op.LEARN}
    for stage, actions in enumerate(lists):
        for op, number in actions:
            if op is Op.RECV_ACT:
                ends_of = made.get((stage - 1, True, number)), made.get((stage, True, number))
                _arrow(axes, *ends_of, inches, theme.act)
            elif op is Op.RECV_GRAD:
                to = learning.get((stage, number)) or made.get((stage, False, number))
                _arrow(axes, made.get((stage + 1, False, number)), to, inches, theme.grad, dashed=True)


def _arrow(axes: Axes, tail: Span | None, head: Span | None, inches: float, color: str, dashed: bool = False) -> None:
    if tail is None or head is None:  # outside of the picture
        return
    half, inset = BOX / 2 if head.stage > tail.stage else -BOX / 2, 0.04
    begins = tail.end * inches - inset, _middle(tail.stage) + half
    ends = head.start * inches + inset, _middle(head.stage) - half
    line = {"color": color, "linewidth": 0.9, "linestyle": DASHES if dashed else "-", "shrinkA": 0, "shrinkB": 0}
    arrow = {"arrowstyle": "-|>,head_length=0.35,head_width=0.14", **line}
    axes.annotate("", xytext=begins, xy=ends, arrowprops=arrow, zorder=3)


def _box(axes: Axes, box: Span, inches: float, label: int | None, theme: Theme, update: Span | None) -> None:
    face, ink = theme.update if box.action.op is Op.UPDATE else STYLES[box.action.op][:2]
    left, right, middle = box.start * inches, box.end * inches, _middle(box.stage)
    if box.action.op is Op.UPDATE:
        left = right - max(right - left, UPDATE)  # what takes no time is drawn over the end of its backward
    corner, room = (left, middle - BOX / 2), right - left
    axes.add_patch(Rectangle(corner, room, BOX, facecolor=face, edgecolor=theme.background, linewidth=0.8, zorder=2))
    if box.action.op is Op.UPDATE:
        _write(axes, (left + right) / 2, middle, f"U{box.action.number}", BOX, 7, ink, rotation=90)
        return
    if update is not None:
        room -= max(0.0, UPDATE - (update.end - update.start) * inches)
    center = left + room / 2
    _write(axes, center, middle if label is None else middle - 0.09, str(box.action.number), room, 9, ink)
    if label is not None:
        _write(axes, center, middle + 0.12, f"LoS {label}", room, 7, ink)


def _write(axes: Axes, x: float, y: float, text: str, room: float, size: float, ink: str, rotation: int = 0) -> None:
    """Write as large as fits, or not at all."""
    size = min(size, room / (LETTER * len(text)))
    if size >= 4:
        axes.text(x, y, text, ha="center", va="center_baseline", fontsize=size, color=ink, rotation=rotation, zorder=4)


def _legend(
    figure: Figure,
    pipeline: Pipeline,
    boxes: Sequence[Span],
    head: tuple[str, str],
    shows_staleness: bool,
    theme: Theme,
    also: Sequence[Artist] = (),
) -> None:
    name, facts = head
    height, left = figure.get_figheight(), LEFT / figure.get_figwidth()
    figure.text(left, 1 - 0.24 / height, name, fontsize=12, fontweight="bold", va="center", color=theme.text)
    figure.text(left, 1 - 0.47 / height, facts, fontsize=9, va="center", color=theme.small_text)
    ops = {box.action.op for box in boxes}
    handles: list[Artist] = [Patch(color=face, label=text) for op, (face, _, text) in STYLES.items() if op in ops]
    if Op.UPDATE in ops:
        handles.append(Patch(color=theme.update[0], label="update"))
    if pipeline.num_stages > 1:
        handles.append(Line2D([], [], color=theme.act, linewidth=1.2, label="activation"))
        if not pipeline.spec.local_losses:
            handles.append(Line2D([], [], color=theme.grad, linewidth=1.2, linestyle=DASHES, label="gradient"))
    handles += also
    place: Any = {"loc": "lower left", "bbox_to_anchor": (left, 0.24 / height), "ncols": len(handles)}
    spaces: Any = {"borderaxespad": 0, "borderpad": 0, "handlelength": 1.4, "columnspacing": 1.3}
    figure.legend(handles=handles, frameon=False, fontsize=8, labelcolor=theme.text, **place, **spaces)
    note = "Numbers: micro-batch; of U the group of micro-batches."
    if shows_staleness:
        note += " LoS: updates of the stage between a micro-batch's forward and its own update."
    figure.text(left, 0.12 / height, note, fontsize=7, va="center", color=theme.small_text)
