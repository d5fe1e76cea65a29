"""Draw the four figures of docs/results/index.md from the tables of that page.

python -m tools.docs_figures [FOLDER]
"""

import re
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGE = Path(__file__).parents[1] / "docs" / "results" / "index.md"
TEXT, GREY = "#808080", "#b0b0b0"  # readable on a light page and on a dark one
COLOURS = {"ddp": "#cc79a7", "ddp-powersgd": "#9a6f52", "torch-1f1b": "#b0b0b0", "zbh1": "#56b4e9"}
COLOURS |= {"zbh1-int8": "#0072b2", "adl": "#e69f00", "adl-full-int8": "#d55e00"}
TICKS = (15, 20, 30, 50, 70, 100, 150, 200, 300, 600, 1200)  # seconds
MARKERS = dict(zip(COLOURS, "ovs^DXP", strict=True))

Table = list[list[str]]


def tables() -> list[Table]:
    """Return the cells of each table of the page, its header first, without marks."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    rows = [[line.strip("|\n").split("|") for line in block.splitlines()] for block in blocks]
    return [[[re.sub(r"[*`]", "", cell).strip() for cell in row] for row in (t[0], *t[2:])] for t in rows]


def draw(folder: Path = PAGE.parent) -> None:
    """Write the figures into ``folder``, the same bytes each time."""
    speed, resnet, gpt, accuracy = tables()
    with rc_context({"svg.hashsalt": "adl_dist", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9}):
        for name, table, paint in (
            ("speed", speed, _speed),
            ("race-resnet18", resnet, _race),
            ("race-gpt", gpt, _race),
            ("accuracy", accuracy, _accuracy),
        ):
            figure = Figure(figsize=(7.6, 3.4), layout="constrained")
            axes = figure.add_subplot()
            paint(axes, table)
            axes.tick_params(colors=TEXT)
            for side, spine in axes.spines.items():
                spine.set(color=GREY, visible=side in ("left", "bottom"))
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


def _speed(axes: Axes, table: Table) -> None:
    rows = [(name, *map(float, re.findall(r"[\d.]*\d", cell))) for name, cell, *_ in table[1:]]
    for y, (name, median, least, most) in enumerate(rows):
        axes.barh(y, median, color=COLOURS["adl-full-int8" if name == "ADL" else "zbh1"])
        axes.plot([least, most], [y, y], color=TEXT)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("images/s, ResNet-56, K = 2: median and range of three rounds", color=TEXT)


def _race(axes: Axes, table: Table) -> None:
    rates = [int(re.match(r"\d+", cell)[0]) for cell in table[0][1:5]]  # type: ignore[index]
    for head, *cells in table[1:]:
        name = head.partition(",")[0]
        if "not reached" not in cells:
            seconds = [float(cell) for cell in cells[:4]]
            axes.plot(rates, seconds, label=head, color=COLOURS[name], marker=MARKERS[name], markersize=5)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(rates, [str(rate) for rate in rates])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [tick for tick in TICKS if low < tick < high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    way = " with a round trip of 20 ms" if "20 ms" in table[0][1] else ""
    axes.set_xlabel(f"rate of the links in Mbit/s{way}", color=TEXT)
    axes.set_ylabel("seconds to the target", color=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT, loc="center left", bbox_to_anchor=(1, 0.5))


def _accuracy(axes: Axes, table: Table) -> None:
    names = [name for name, *_ in table[1:]]
    for i, (column, colour) in enumerate((("SGD, K = 16", COLOURS["zbh1"]), ("Muon, K = 16", COLOURS["adl"]))):
        values = [float(row[table[0].index(column)]) for row in table[1:]]
        places = [y + 0.4 * i for y in range(len(values))]
        axes.barh(places, values, height=0.38, label=column, color=colour)
        for y, value in zip(places, values, strict=True):
            axes.text(value + 0.1, y, f"{value}", va="center", fontsize=8, color=TEXT)
        axes.axvline(values[0], color=colour, linestyle=":", linewidth=1)
    axes.set_yticks([y + 0.2 for y in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlim(left=38)
    axes.set_xlabel("validation accuracy in %, M = 4; the axis begins at 38", color=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT, loc="center left", bbox_to_anchor=(1, 0.5))


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
