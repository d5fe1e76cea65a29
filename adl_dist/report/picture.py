"""Pictures of schedules: a lane per stage, boxes and arrows.

Import it late: matplotlib takes half a second.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from adl_dist.errors import ConfigError
from adl_dist.report.files import check_out, write_atomically
from adl_dist.report.spans import BOXES, FORWARDS, STYLES, arrows, spans_of_ticks
from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.table import figures, title
from adl_dist.schedule.timing import Costs, Span, in_processes, simulate, ticks

MOST_TICKS = 400  # more cannot be read
DASHES: Any = (0, (4, 1.6))
SMALL_TEXT, LANE_COLOUR, GRID = "#555555", "#EFEFEF", "#C8C8C8"
UPDATE_COLOUR, ACT, GRAD = "#333333", "#0072B2", "#D55E00"

# In inches.
LANE, BOX = 0.95, 0.5
UPDATE = 0.15
LEFT, RIGHT, TOP, BOTTOM = 1.05, 0.2, 0.65, 0.9
NARROWEST = 6.5  # room for the words
LETTER = 0.0092  # width of a digit per point of its size
WIDEST = 300.0


def draw(pipeline: Pipeline, path: Path, *, num_micro_batches: int, costs: Costs | None = None) -> None:
    """Draw a segment into a file, the same bytes for the same schedule.

    Args:
        pipeline: the schedule.
        path: the file, .svg, .png or .pdf.
        num_micro_batches: length of the segment.
        costs: times of the actions; without them the axis counts ticks.

    Raises:
        ConfigError: If the kind of file is unknown, there are too many ticks, or the file cannot be written.
    """
    check_out(path)
    # No random ids, no dates; letters as shapes, which look the same everywhere.
    with rc_context({"svg.hashsalt": "adl_dist", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure = picture(pipeline, num_micro_batches=num_micro_batches, costs=costs)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
        dpi = min(200.0, 30_000 / figure.get_figwidth())
        try:
            with write_atomically(path) as unfinished:
                figure.savefig(unfinished, dpi=dpi, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another place") from error


def picture(pipeline: Pipeline, *, num_micro_batches: int, costs: Costs | None = None) -> Figure:
    """Return the figure of a schedule; see :func:`draw`."""
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    table = ticks(lists, turns=turns)
    num_ticks = max((max(row) + 1 for row in table if row), default=0)
    if num_ticks > MOST_TICKS:
        fewer = f"lower --micro-batches, which is {num_micro_batches}"
        raise ConfigError(f"a picture of {num_ticks} ticks cannot be read; expected at most {MOST_TICKS}: {fewer}")
    spans = list(spans_of_ticks(table)) if costs is None else simulate(lists, costs, turns=turns)
    drawing = _Drawing(pipeline, [span for span in spans if span.action.op in BOXES])
    drawing.axis(num_ticks if costs is None else None)
    drawing.arrows(lists)
    drawing.boxes()
    name, facts = title(pipeline, num_micro_batches=num_micro_batches).rsplit(": ", 1)
    drawing.legend(name, facts)
    return drawing.figure


class _Drawing:
    """A figure with a lane for each stage, in units of time and, downwards, in inches."""

    def __init__(self, pipeline: Pipeline, boxes: Sequence[Span]) -> None:
        self._pipeline, self._boxes = pipeline, boxes
        self._shows_staleness = any(f.staleness_max for f in figures(pipeline))
        length = max(box.end for box in boxes)
        # Forwards are wide enough for their numbers.
        usual = median([box.end - box.start for box in boxes if box.action.op in FORWARDS]) or length / len(boxes)
        largest = max(box.action.number for box in boxes if box.action.op in STYLES)
        self._inches = min(max(0.26, LETTER * 9 * len(str(largest)) + 0.1) / usual, WIDEST / length)  # a unit of time
        width, height = length * self._inches, pipeline.num_stages * LANE
        wide, high = LEFT + max(width, NARROWEST) + RIGHT, TOP + height + BOTTOM
        self.figure = Figure(figsize=(wide, high))
        self._axes = self.figure.add_axes((LEFT / wide, BOTTOM / high, width / wide, height / high))
        self._axes.set(xlim=(0, length), ylim=(height, 0), yticks=[])
        self._axes.spines[["left", "right", "top"]].set_visible(False)
        for stage in range(pipeline.num_stages):
            self._lane(stage, length)

    def _lane(self, stage: int, length: float) -> None:
        own = next(f for f in figures(self._pipeline) if f.stage == stage)
        lane = Rectangle((0, _middle(stage) - BOX / 2), length, BOX, color=LANE_COLOUR, linewidth=0, zorder=0)
        self._axes.add_patch(lane)
        labels = [f"delay {own.delay}", f"mean LoS {own.staleness_mean:.3g}"][: 1 + self._shows_staleness]
        left, top = -0.12 / self._inches, _middle(stage) - 0.09 * len(labels)
        self._axes.text(left, top, f"stage {stage}", fontsize=10, ha="right", va="center")
        for i, text in enumerate(labels, start=1):
            self._axes.text(left, top + 0.18 * i, text, fontsize=8, color=SMALL_TEXT, ha="right", va="center")

    def axis(self, num_ticks: int | None) -> None:
        """Label the axis with ticks and lines between them, or with times."""
        self._axes.set_xlabel("time (unit of the costs)" if num_ticks is None else "tick", fontsize=9, labelpad=3)
        self._axes.tick_params(axis="x", labelsize=9)
        if num_ticks is not None:
            self._axes.set_xticks([tick + 0.5 for tick in range(num_ticks)], map(str, range(num_ticks)))
            self._axes.tick_params(axis="x", length=0)
            for tick in range(num_ticks + 1):
                self._axes.axvline(tick, color=GRID, linewidth=0.6, zorder=0.5)

    def arrows(self, lists: Sequence[Sequence[Action]]) -> None:
        """Draw an arrow from the work of each message to the work that needs it."""
        messages = [(stage, action) for stage, actions in enumerate(lists) for action in actions]
        inset = 0.04 / self._inches
        for tail, head, is_act in arrows(self._boxes, messages):
            half = BOX / 2 if head.stage > tail.stage else -BOX / 2
            begins, ends = (
                (tail.end - inset, _middle(tail.stage) + half),
                (head.start + inset, _middle(head.stage) - half),
            )
            line = {"color": ACT if is_act else GRAD, "linestyle": "-" if is_act else DASHES, "linewidth": 0.9}
            arrow = {"arrowstyle": "-|>,head_length=0.35,head_width=0.14", "shrinkA": 0, "shrinkB": 0, **line}
            self._axes.annotate("", xytext=begins, xy=ends, arrowprops=arrow, zorder=3)

    def boxes(self) -> None:
        """Draw the work."""
        updates = {(box.stage, box.start): box for box in self._boxes if box.action.op is Op.UPDATE}
        for box in self._boxes:
            self._box(box, updates.get((box.stage, box.end)))

    def _box(self, box: Span, update: Span | None) -> None:
        is_update = box.action.op is Op.UPDATE
        face, ink = (UPDATE_COLOUR, "white") if is_update else STYLES[box.action.op][:2]
        left, middle, least = box.start, _middle(box.stage), UPDATE / self._inches
        if is_update:
            left = min(left, box.end - least)  # an update without a duration covers the end of its backward
        corner, room = (left, middle - BOX / 2), box.end - left
        self._axes.add_patch(Rectangle(corner, room, BOX, facecolor=face, edgecolor="white", linewidth=0.8, zorder=2))
        if is_update:
            self._write(left + room / 2, middle, f"U{box.action.number}", BOX, 7, ink, rotation=90)
            return
        if update is not None:
            room -= max(0.0, least - (update.end - update.start))
        center, label = left + room / 2, None
        if self._shows_staleness and box.action.op in BACKWARDS:
            label = self._pipeline.staleness(box.stage, box.action.number)
        room *= self._inches
        self._write(center, middle if label is None else middle - 0.09, str(box.action.number), room, 9, ink)
        if label is not None:
            self._write(center, middle + 0.12, f"LoS {label}", room, 7, ink)

    def _write(self, x: float, y: float, text: str, room: float, size: float, ink: str, rotation: int = 0) -> None:
        """Write as large as fits into ``room`` inches, or not at all."""
        size = min(size, room / (LETTER * len(text)))
        if size >= 4:
            how: Any = {"ha": "center", "va": "center_baseline", "rotation": rotation, "zorder": 4}
            self._axes.text(x, y, text, fontsize=size, color=ink, **how)

    def legend(self, name: str, facts: str) -> None:
        """Write the title and the legend."""
        figure, height, left = self.figure, self.figure.get_figheight(), LEFT / self.figure.get_figwidth()
        figure.text(left, 1 - 0.24 / height, name, fontsize=12, fontweight="bold", va="center")
        figure.text(left, 1 - 0.47 / height, facts, fontsize=9, va="center", color=SMALL_TEXT)
        ops = {box.action.op for box in self._boxes}
        handles: list[Artist] = [Patch(color=face, label=text) for op, (face, _, text) in STYLES.items() if op in ops]
        if Op.UPDATE in ops:
            handles.append(Patch(color=UPDATE_COLOUR, label="update"))
        if self._pipeline.num_stages > 1:
            handles.append(Line2D([], [], color=ACT, linewidth=1.2, label="activation"))
            if not self._pipeline.spec.local_losses:
                handles.append(Line2D([], [], color=GRAD, linewidth=1.2, linestyle=DASHES, label="gradient"))
        place: Any = {"loc": "lower left", "bbox_to_anchor": (left, 0.24 / height), "ncols": len(handles)}
        spaces: Any = {"borderaxespad": 0, "borderpad": 0, "handlelength": 1.4, "columnspacing": 1.3}
        figure.legend(handles=handles, frameon=False, fontsize=8, **place, **spaces)
        note = "Numbers: micro-batch; of U the group of micro-batches."
        if self._shows_staleness:
            note += " LoS: updates of the stage between a micro-batch's forward and its own update."
        figure.text(left, 0.12 / height, note, fontsize=7, va="center", color=SMALL_TEXT)


def _middle(stage: int) -> float:
    return (stage + 0.5) * LANE
