"""Speeds side by side: a bar for each way to train, its median, and the least and the most as a whisker."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from adl_dist.report.curves import COLOURS, STYLE, save_figure

BAR_INCHES, WIDTH_INCHES = 0.27, 6.5


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One way to train. Speeds are in images per second; ``group`` gives it its colour and its place in the legend."""

    label: str
    group: str
    median: float
    least: float
    most: float


def draw_bars(path: Path, bars: Sequence[Bar], *, reference: float | None, title: str) -> None:
    """Draw ``bars`` from top to bottom.

    Args:
        path: FILE.svg, FILE.png or FILE.pdf; what is there already is replaced.
        bars: in the order of the table.
        reference: a speed that all are compared with, as a line; None: there is none.
        title: of the picture.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, BAR_INCHES * len(bars) + 1.2), layout="constrained")
        axes = figure.subplots()
        for colour, group in zip(COLOURS, groups, strict=False):
            own = [(place, bar) for place, bar in enumerate(bars) if bar.group == group]
            around = [[b.median - b.least for _, b in own], [b.most - b.median for _, b in own]]
            axes.barh(
                [place for place, _ in own],
                [bar.median for _, bar in own],
                xerr=around,
                color=colour,
                height=0.7,
                label=group,
                error_kw={"ecolor": "#333333", "elinewidth": 1.0, "capsize": 2.0},
            )
        if reference is not None:
            axes.axvline(reference, color="#333333", linestyle="--", linewidth=1.0, label="reference")
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("images/s, median (least to most)")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
