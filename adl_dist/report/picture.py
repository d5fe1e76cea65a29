"""Pictures of schedules: a lane per stage, boxes and arrows.

Import it late: matplotlib takes half a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from adl_dist.errors import ConfigError
from adl_dist.report.files import check_out, write_atomically
from adl_dist.report.spans import BOXES, FORWARDS, STYLES, arrows, spans_of_ticks
from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.table import figures, tied_figures, title
from adl_dist.schedule.timing import Costs, Span, in_processes, simulate, ticks

MOST_TICKS = 400  # more cannot be read
DASHES = (0, (4, 1.6))


@dataclass(frozen=True)
class Theme:
    """The colours that depend on the background."""

    background: str
    text: str
    small_text: str
    lane: str
    grid: str
    update: tuple[str, str]  # face, text
    act: str
    grad: str


LIGHT = Theme("white", "black", "#555555", "#EFEFEF", "#C8C8C8", ("#333333", "white"), "#0072B2", "#D55E00")
DARK = Theme("#0D1117", "#E6EDF3", "#A8B1BB", "#1F262E", "#3A434D", ("#D7DDE3", "black"), "#56B4E9", "#F28E45")

# In inches.
LANE, BOX = 0.95, 0.5
UPDATE = 0.15
LEFT, RIGHT, TOP, BOTTOM = 1.05, 0.2, 0.65, 0.9
NARROWEST = 6.5  # room for the words
LETTER = 0.0092  # width of a digit per point of its size
WIDEST = 300.0


def draw(
    pipeline: Pipeline, path: Path, *, num_micro_batches: int, costs: Costs | None = None, theme: Theme = LIGHT
) -> None:
    """Draw a segment into a file, the same bytes for the same schedule.

    Args:
        pipeline: the schedule.
        path: the file, .svg, .png or .pdf.
        num_micro_batches: length of the segment.
        costs: times of the actions; without them the axis counts ticks.
        theme: colours.

    Raises:
        ConfigError: If the kind of file is unknown, there are too many ticks, or the file cannot be written.
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
) -> Figure:
    """Return the figure of a schedule; see :func:`draw`."""
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    table = ticks(lists, turns=turns)
    num_ticks = max((max(row) + 1 for row in table if row), default=0)
    if num_ticks > MOST_TICKS:
        fewer = f"lower --micro-batches, which is {num_micro_batches}"
        raise ConfigError(f"a picture of {num_ticks} ticks cannot be read; expected at most {MOST_TICKS}: {fewer}")
    spans = list(spans_of_ticks(table)) if costs is None else simulate(lists, costs, turns=turns)
    boxes = [span for span in spans if span.action.op in BOXES]
    length = max(box.end for box in boxes)
    drawing = _Drawing(pipeline, boxes, length, min(_scale(boxes), WIDEST / length), theme)
    if costs is None:
        drawing.axis_of_ticks(num_ticks)
    else:
        drawing.axis_of_time("unit of the costs")
    drawing.arrows(lists)
    drawing.boxes()
    name, facts = title(pipeline, num_micro_batches=num_micro_batches).rsplit(": ", 1)
    drawing.legend(name, facts)
    return drawing.figure


def _scale(boxes: Sequence[Span]) -> float:
    """Return the inches per unit of time at which forwards show a number."""
    usual = median([box.end - box.start for box in boxes if box.action.op in FORWARDS])
    usual = usual or max(box.end for box in boxes) / len(boxes)
    largest = max(box.action.number for box in boxes if box.action.op in STYLES)
    return float(max(0.26, LETTER * 9 * len(str(largest)) + 0.1) / usual)


class _Drawing:
    """A figure with a lane for each stage."""

    def __init__(
        self,
        pipeline: Pipeline,
        boxes: Sequence[Span],
        length: float,
        inches: float,
        theme: Theme,
    ) -> None:
        """Draw empty lanes for ``length`` units of time of so many ``inches``."""
        self._pipeline, self._boxes, self._length, self._inches = pipeline, boxes, length, inches
        self._shows_staleness, self._theme = any(f.staleness_max for f in figures(pipeline)), theme
        width, height = length * inches, pipeline.num_stages * LANE
        size = (LEFT + max(width, NARROWEST) + RIGHT, TOP + height + BOTTOM)
        self.figure = Figure(figsize=size, facecolor=theme.background)
        wide, high = self.figure.get_size_inches()
        place = LEFT / wide, BOTTOM / high, width / wide, height / high
        self._axes = self.figure.add_axes(place, facecolor=theme.background)
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        self._lanes(width)

    def _lanes(self, width: float) -> None:
        right: Any = {"ha": "right", "va": "center"}
        for f in figures(self._pipeline):
            middle = _middle(f.stage)
            lane = Rectangle((0, middle - BOX / 2), width, BOX, color=self._theme.lane, linewidth=0, zorder=0)
            self._axes.add_patch(lane)
            labels = [f"delay {f.delay}", f"mean LoS {f.staleness_mean:.3g}"][: 1 + self._shows_staleness]
            if tied := [f"{copy.staleness_mean:.3g}" for copy in tied_figures(self._pipeline) if copy.stage == f.stage]:
                labels.append(f"tied LoS {'/'.join(tied)}")
            top = middle - 0.09 * len(labels)
            self._axes.text(-0.12, top, f"stage {f.stage}", fontsize=10, color=self._theme.text, **right)
            for i, text in enumerate(labels, start=1):
                self._axes.text(-0.12, top + 0.18 * i, text, fontsize=8, color=self._theme.small_text, **right)
        self._axes.set_yticks([])
        for side in ("left", "right", "top"):
            self._axes.spines[side].set_visible(False)
        self._axes.spines["bottom"].set_color(self._theme.text)
        self._axes.tick_params(axis="x", colors=self._theme.text)

    def axis_of_time(self, unit: str) -> None:
        """Label the axis with times."""
        bins = max(4, int(self._length * self._inches))
        candidates = MaxNLocator(nbins=bins).tick_values(0, self._length)
        places = [t for t in candidates if 0 <= t <= self._length + 1e-9]
        self._axes.set_xticks([t * self._inches for t in places], [f"{t:g}" for t in places], fontsize=9)
        self._axes.set_xlabel(f"time ({unit})", fontsize=9, labelpad=3, color=self._theme.text)

    def axis_of_ticks(self, num_ticks: int) -> None:
        """Draw the number of each tick, and lines between them."""
        places = [(tick + 0.5) * self._inches for tick in range(num_ticks)]
        self._axes.set_xticks(places, map(str, range(num_ticks)), fontsize=9)
        self._axes.tick_params(axis="x", length=0)
        self._axes.set_xlabel("tick", fontsize=9, labelpad=3, color=self._theme.text)
        for tick in range(num_ticks + 1):
            self._axes.axvline(tick * self._inches, color=self._theme.grid, linewidth=0.6, zorder=0.5)

    def arrows(self, lists: Sequence[Sequence[Action]]) -> None:
        """Draw an arrow from the work of each message to the work that needs it."""
        messages = [(stage, action) for stage, actions in enumerate(lists) for action in actions]
        for tail, head, is_act in arrows(self._boxes, messages):
            self._arrow(tail, head, *((self._theme.act, "-") if is_act else (self._theme.grad, DASHES)))

    def _arrow(self, tail: Span, head: Span, color: str, style: Any) -> None:
        half, inset = BOX / 2 if head.stage > tail.stage else -BOX / 2, 0.04
        begins = tail.end * self._inches - inset, _middle(tail.stage) + half
        ends = head.start * self._inches + inset, _middle(head.stage) - half
        line = {"color": color, "linewidth": 0.9, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        arrow = {"arrowstyle": "-|>,head_length=0.35,head_width=0.14", **line}
        self._axes.annotate("", xytext=begins, xy=ends, arrowprops=arrow, zorder=3)

    def boxes(self) -> None:
        """Draw the work."""
        updates = {(box.stage, box.start): box for box in self._boxes if box.action.op is Op.UPDATE}
        for box in self._boxes:
            self._box(box, updates.get((box.stage, box.end)))

    def _box(self, box: Span, update: Span | None) -> None:
        is_update = box.action.op is Op.UPDATE
        face, ink = self._theme.update if is_update else STYLES[box.action.op][:2]
        left, right, middle = box.start * self._inches, box.end * self._inches, _middle(box.stage)
        if is_update:
            left = right - max(right - left, UPDATE)  # an update without a duration covers the end of its backward
        corner, room = (left, middle - BOX / 2), right - left
        edge: Any = {"edgecolor": self._theme.background, "linewidth": 0.8}
        self._axes.add_patch(Rectangle(corner, room, BOX, facecolor=face, zorder=2, **edge))
        if is_update:
            self._write((left + right) / 2, middle, f"U{box.action.number}", BOX, 7, ink, rotation=90)
            return
        if update is not None:
            room -= max(0.0, UPDATE - (update.end - update.start) * self._inches)
        center, label = left + room / 2, None
        if self._shows_staleness and box.action.op in BACKWARDS:
            label = self._pipeline.staleness(box.stage, box.action.number)
        self._write(center, middle if label is None else middle - 0.09, str(box.action.number), room, 9, ink)
        if label is not None:
            self._write(center, middle + 0.12, f"LoS {label}", room, 7, ink)

    def _write(self, x: float, y: float, text: str, room: float, size: float, ink: str, rotation: int = 0) -> None:
        """Write as large as fits, or not at all."""
        size = min(size, room / (LETTER * len(text)))
        if size >= 4:
            how: Any = {"ha": "center", "va": "center_baseline", "rotation": rotation, "zorder": 4}
            self._axes.text(x, y, text, fontsize=size, color=ink, **how)

    def legend(self, name: str, facts: str) -> None:
        """Write the title and the legend."""
        figure, theme = self.figure, self._theme
        height, left = figure.get_figheight(), LEFT / figure.get_figwidth()
        figure.text(left, 1 - 0.24 / height, name, fontsize=12, fontweight="bold", va="center", color=theme.text)
        figure.text(left, 1 - 0.47 / height, facts, fontsize=9, va="center", color=theme.small_text)
        ops = {box.action.op for box in self._boxes}
        handles: list[Artist] = [Patch(color=face, label=text) for op, (face, _, text) in STYLES.items() if op in ops]
        if Op.UPDATE in ops:
            handles.append(Patch(color=theme.update[0], label="update"))
        if self._pipeline.num_stages > 1:
            handles.append(Line2D([], [], color=theme.act, linewidth=1.2, label="activation"))
            if not self._pipeline.spec.local_losses:
                handles.append(Line2D([], [], color=theme.grad, linewidth=1.2, linestyle=DASHES, label="gradient"))
        place: Any = {"loc": "lower left", "bbox_to_anchor": (left, 0.24 / height), "ncols": len(handles)}
        spaces: Any = {"borderaxespad": 0, "borderpad": 0, "handlelength": 1.4, "columnspacing": 1.3}
        figure.legend(handles=handles, frameon=False, fontsize=8, labelcolor=theme.text, **place, **spaces)
        note = "Numbers: micro-batch; of U the group of micro-batches."
        if self._shows_staleness:
            note += " LoS: updates of the stage between a micro-batch's forward and its own update."
        figure.text(left, 0.12 / height, note, fontsize=7, va="center", color=theme.small_text)


def _middle(stage: int) -> float:
    return (stage + 0.5) * LANE
