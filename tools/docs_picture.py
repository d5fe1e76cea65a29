"""Draw the picture of README and docs/index.md: 1F1B and ADL side by side in time, into docs/images.

    python -m tools.docs_picture [FOLDER]

The boxes are those of the schedules that training executes, with a backward twice as long as a forward and free links.
"""

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from adl_dist.schedule import Costs, Pipeline, actions_of_all, method, simulate
from adl_dist.schedule.actions import Op

FOLDER = Path(__file__).parents[1] / "docs" / "images"
K, M = 3, 4
END = 54.0  # units of time: three updates of 1F1B
COLOURS = {Op.FORWARD: "#56b4e9", Op.BACKWARD: "#e69f00"}
TEXT = {"light": "#222222", "dark": "#e6e6e6"}
IDLE = {"light": "#e4e4e4", "dark": "#484848"}
BANDS = {
    "1f1b": "1F1B, a synchronous pipeline: 3 updates, and each device is idle for a third of the time",
    "adl": "ADL: 4 updates in the same time; once the pipeline is full, no device is idle",
}


def draw(folder: Path = FOLDER) -> None:
    """Write schedule-light.svg and schedule-dark.svg into ``folder``, the same bytes each time."""
    for theme in TEXT:
        with rc_context({"svg.hashsalt": "adl_dist", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
            figure = Figure(figsize=(9.2, 3.6))
            for row, name in enumerate(BANDS):
                axes = figure.add_axes((0.075, 0.57 - 0.44 * row, 0.915, 0.35))
                _band(axes, name, theme)
            boxes = {"forward": COLOURS[Op.FORWARD], "backward": COLOURS[Op.BACKWARD]}
            boxes |= {"update": TEXT[theme], "idle": IDLE[theme]}
            handles = [Patch(color=colour, label=label) for label, colour in boxes.items()]
            place = {"loc": "lower left", "bbox_to_anchor": (0.065, -0.01), "ncols": 4, "fontsize": 8.5}
            figure.legend(handles=handles, labelcolor=TEXT[theme], frameon=False, **place)
            words = f"K = {K} devices, M = {M} micro-batches per update; time runs to the right"
            figure.text(0.99, 0.035, words, ha="right", fontsize=8.5, color=TEXT[theme])
            path = folder / f"schedule-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})


def _band(axes: Axes, name: str, theme: str) -> None:
    """Draw one lane for each stage of the method called ``name``."""
    axes.set(xlim=(0, END), ylim=(K - 0.5, -0.5))
    axes.set_axis_off()
    axes.text(0, -0.72, BANDS[name], fontsize=9.5, weight="bold", color=TEXT[theme])
    lists = actions_of_all(Pipeline(method(name, accumulation_steps=M), K), num_micro_batches=6 * M)
    for k in range(K):
        axes.add_patch(Rectangle((0, k - 0.4), END, 0.8, color=IDLE[theme], linewidth=0))
        axes.text(-0.5, k, f"device {k}", ha="right", va="center", fontsize=8.5, color=TEXT[theme])
    for span in simulate(lists, Costs.balanced(K)):
        op, end = span.action.op, min(span.end, END)
        if op in COLOURS and span.start < END:
            corner = span.start + 0.04, span.stage - 0.4
            axes.add_patch(Rectangle(corner, end - span.start - 0.08, 0.8, color=COLOURS[op], linewidth=0))
            if end == span.end:
                place = (span.start + end) / 2, span.stage
                words = {"ha": "center", "va": "center", "fontsize": 7, "color": "#111111"}
                axes.text(*place, str(span.action.number), **words)
        elif op is Op.UPDATE and span.end <= END:
            corner = span.end - 0.36, span.stage - 0.4
            axes.add_patch(Rectangle(corner, 0.36, 0.8, color=TEXT[theme], linewidth=0, zorder=3))


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
