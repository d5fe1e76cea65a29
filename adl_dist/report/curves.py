"""Learning curves: a panel per K, a colour per row of the table."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from adl_dist.report.runs import ACCURACY, REFERENCE, Measure, Run

# Okabe and Ito's colours, safe for the colour-blind; black is the reference.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES: Sequence[Any] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "adl_dist",  # the same picture is the same file
}
PANEL_INCHES = (3.9, 3.3)
LEGEND_COLUMN_INCHES, LEGEND_ROW_INCHES = 1.65, 0.19
MOST_COLUMNS = 3
STEEP = 0.4  # share of the epochs whose values may be outside of the picture
CROSS: Mapping[str, Any] = {"marker": "X", "markersize": 7, "markeredgecolor": "white", "linestyle": "none"}


def draw_curves(runs: Sequence[Run], measure: Measure) -> Figure:
    """Draw the median over seeds as a line, and their range as a band.

    Each diverged run has its own line, which ends with a cross.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    references = [run for run in runs if run.method["name"] == REFERENCE]
    black = itertools.cycle({"color": "black", "linestyle": style, "linewidth": 2.0} for style in STYLES)
    bright = itertools.cycle({"color": c, "linestyle": style, "linewidth": 1.4} for style in STYLES for c in COLOURS)
    looks = {label: next(black if any(run.label == label for run in references) else bright) for label in labels}
    # The result of the reference does not depend on K: it needs no panel of its own and is drawn in all others.
    stages = sorted({run.num_stages for run in runs if run not in references} or {run.num_stages for run in runs})
    columns = min(len(stages), MOST_COLUMNS)
    rows, width = math.ceil(len(stages) / columns), max(columns * PANEL_INCHES[0], 5.0)
    legend_columns = min(len(labels), max(1, int(width / LEGEND_COLUMN_INCHES)))
    legend_inches = LEGEND_ROW_INCHES * math.ceil((len(labels) + 1) / legend_columns) + 0.1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, rows * PANEL_INCHES[1] + legend_inches), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        for axes in panels[len(stages) :]:
            axes.set_visible(False)
        _set_range(panels[0], runs, measure)  # the panels share it
        for place, (axes, K) in enumerate(zip(panels, stages, strict=False)):
            labels_here = {run.label for run in runs if run.num_stages == K}
            shown = [r for r in runs if r.num_stages == K or (r in references and r.label not in labels_here)]
            _draw_panel(axes, shown, looks, measure)
            axes.set_title(f"K = {K}", loc="left", fontweight="bold")
            if place + columns >= len(stages):  # nothing below it
                axes.set_xlabel("epoch")
                axes.tick_params(labelbottom=True)
            if place % columns == 0:
                axes.set_ylabel(f"{measure.name.replace('/', ' ')}{' (%)' * (measure.scale == 100)}")
        handles = [Line2D([], [], label=label, **looks[label]) for label in labels]
        if any(run.status == "diverged" for run in runs):
            handles.append(Line2D([], [], color="#555555", label="diverged", **CROSS))
        below: Any = {"loc": "outside lower center", "ncols": legend_columns, "frameon": False, "handlelength": 2.6}
        figure.legend(handles=handles, **below)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Save ``figure``; equal figures give equal bytes."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_panel(axes: Axes, runs: Sequence[Run], looks: Mapping[str, Mapping[str, Any]], measure: Measure) -> None:
    for place, label in enumerate(reversed([label for label in looks if any(r.label == label for r in runs)])):
        look, shown = looks[label], [run for run in runs if run.label == label]
        ends = [_scaled(run, measure) for run in shown if run.status == "complete"]
        at = {epoch: [curve[epoch] for curve in ends if epoch in curve] for epoch in sorted(set().union(*ends))}
        axes.plot(list(at), list(map(statistics.median, at.values())), zorder=3 + 0.01 * place, **look)
        low, high = list(map(min, at.values())), list(map(max, at.values()))
        axes.fill_between(list(at), low, high, color=look["color"], alpha=0.3 / math.sqrt(len(looks)), linewidth=0)
        for run in (run for run in shown if run.status == "diverged"):
            curve, (least, most) = _scaled(run, measure), axes.get_ylim()
            axes.plot(list(curve), list(curve.values()), zorder=2.9, **{**look, "linewidth": 1.0, "alpha": 0.8})
            # The cross of a run that ended before its first validation, or outside the panel, is on the edge.
            end = max(curve, default=run.divergence.get("epoch", 0) + 1)
            value = min(max(curve.get(end, least if measure is ACCURACY else most), least), most)
            axes.plot([end], [value], color=look["color"], zorder=5, clip_on=False, **CROSS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _scaled(run: Run, measure: Measure) -> dict[float, float]:
    return {point.epoch: point.value * measure.scale for point in run.finite(measure.name)}


def _set_range(axes: Axes, runs: Sequence[Run], measure: Measure) -> None:
    """Limit the panel to where the curves differ, after their steep beginning."""
    longest = max((epoch for run in runs for epoch in _scaled(run, measure)), default=1)
    ends = [_scaled(run, measure) for run in runs if run.status == "complete"]
    settled = [value for curve in ends for epoch, value in curve.items() if epoch > longest * STEEP]
    low, high = min(settled, default=0.0), max(settled, default=measure.scale)
    margin = 0.04 * (high - low) or 1e-3
    axes.set_ylim(low - margin, high + margin)
    if longest > 1:
        axes.set_xlim(1, longest)
