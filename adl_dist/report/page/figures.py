"""The figures of a run's page: learning curves, speed, shares of time, memory, and the measured timeline."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from adl_dist.report.curves import COLOURS
from adl_dist.report.curves import STYLE as CURVES_STYLE
from adl_dist.report.page.records import Record, Timeline, training_seconds
from adl_dist.report.picture import LIGHT, STYLES
from adl_dist.schedule.actions import Op

# The shares of a stage's time, in the colours of the schedule's picture where that has them.
SHARES = {
    "forward": STYLES[Op.FORWARD][0],
    "recompute": STYLES[Op.RECOMPUTE][0],
    "backward": STYLES[Op.BACKWARD][0],
    "update": LIGHT.update[0],
    "load": "#CC79A7",
    "send": "#0072B2",
    "wait_act": "#E4E7EB",
    "wait_grad": "#C9CED6",
    "wait_other": "#DADDE2",
    "other": "#F2F2F2",
}
WIDTH = 8.6  # inches
POINTS = 400  # of a curve: more cannot be told apart


def draw_learning(records: Mapping[str, Sequence[Record]]) -> Figure | None:
    """Draw training and validation, by update and by time; None: there is no record of them."""
    names = [name for name in ("loss", "accuracy") if f"train/{name}" in records or f"validation/{name}" in records]
    if not names:
        return None
    seconds = training_seconds(records.get("train/loss", ()))
    axis_of_time = bool(seconds)
    with matplotlib.rc_context(CURVES_STYLE):
        figure = Figure(figsize=(WIDTH, 2.6 * len(names)), layout="constrained")
        panels = figure.subplots(len(names), 1 + axis_of_time, squeeze=False)
        for row, name in zip(panels, names, strict=True):
            _learning(row[0], records, name, {})
            row[0].set_ylabel(f"{name}{' (%)' * (name == 'accuracy')}")
            if axis_of_time:
                _learning(row[1], records, name, seconds)
        panels[-1][0].set_xlabel("update")
        if axis_of_time:
            panels[-1][1].set_xlabel("seconds of training")
        panels[0][0].legend(frameon=False)
    return figure


def _learning(axes: Axes, records: Mapping[str, Sequence[Record]], name: str, seconds: Mapping[int, float]) -> None:
    scale = 100 if name == "accuracy" else 1
    train = _thinned(records.get(f"train/{name}", ()))
    places = [seconds.get(update, 0.0) if seconds else update for update, _ in train]
    axes.plot(places, [scale * value for _, value in train], color=COLOURS[5], linewidth=1, label="training")
    marks = [(r["update"], scale * r["value"]) for r in records.get(f"validation/{name}", ())]
    marks = [(seconds.get(update, update) if seconds else update, value) for update, value in marks]
    if marks:
        axes.plot(*zip(*marks, strict=True), color=COLOURS[1], marker="o", markersize=3, label="validation")


def _thinned(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return (update, value), the means of neighbours where there are more than a figure can show."""
    size = max(1, len(records) // POINTS)
    groups = [records[i : i + size] for i in range(0, len(records), size)]
    return [(group[-1]["update"], statistics.fmean(r["value"] for r in group)) for group in groups]


def draw_speed(records: Mapping[str, Sequence[Record]]) -> Figure | None:
    """Draw the throughput of each epoch; None: no epoch has ended."""
    of_epochs = records.get("train/samples_per_second", ())
    if not of_epochs:
        return None
    with matplotlib.rc_context(CURVES_STYLE):
        figure = Figure(figsize=(WIDTH, 1.9), layout="constrained")
        axes = figure.subplots()
        epochs = [record["epoch"] + 1 for record in of_epochs]
        axes.plot(epochs, [record["value"] for record in of_epochs], color=COLOURS[0], marker="o", markersize=3)
        axes.set(xlabel="epoch", ylabel="samples / s", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_shares(stages: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw for each stage of summary.json how it spent its time; without a trace only how much it was busy."""
    shares = [stage.get("shares") or {"busy": stage["busy_share"]} for stage in stages]
    colours = {**SHARES, "busy": COLOURS[0]}
    with matplotlib.rc_context({**CURVES_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 0.7 + 0.32 * len(stages)), layout="constrained")
        axes = figure.subplots()
        for place, (stage, parts) in enumerate(zip(stages, shares, strict=True)):
            left = 0.0
            for name in (name for name in colours if parts.get(name)):
                axes.barh(place, 100 * parts[name], left=left, color=colours[name], height=0.7)
                left += 100 * parts[name]
            axes.text(101, place, f"busy {stage['busy_share']:.0%}", va="center", fontsize=8)
        axes.set(xlim=(0, 100), xlabel="% of training time", ylim=(len(stages) - 0.5, -0.5))
        axes.set_yticks(range(len(stages)), [f"stage {stage['stage']}" for stage in stages])
        used = [name for name in colours if any(parts.get(name) for parts in shares)]
        _name_colours(figure, {name: colours[name] for name in used})
    return figure


def draw_memory(held: Sequence[tuple[str, float]]) -> Figure:
    """Draw peaks of memory: pairs of whose and how many MiB."""
    with matplotlib.rc_context({**CURVES_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 0.6 + 0.3 * len(held)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(range(len(held)), [mebibytes for _, mebibytes in held], color=COLOURS[2], height=0.7)
        axes.bar_label(bars, fmt="{:,.0f} MiB", padding=3, fontsize=8)
        axes.set_yticks(range(len(held)), [name for name, _ in held])
        axes.set(xlabel="MiB", ylim=(len(held) - 0.5, -0.5))
        axes.margins(x=0.15)
    return figure


def draw_timeline(timeline: Timeline) -> Figure:
    """Draw what each stage did in some updates, as it was measured."""
    lanes = list(timeline.stages)
    with matplotlib.rc_context({**CURVES_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(WIDTH * 1.3, 0.9 + 0.45 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        end = 0.0
        for place, stage in enumerate(lanes):
            for share, _, begin, seconds in timeline.stages[stage]:
                face = SHARES.get(share, SHARES["other"])
                axes.add_patch(Rectangle((1e3 * begin, place - 0.4), 1e3 * seconds, 0.8, color=face, linewidth=0))
                end = max(end, 1e3 * (begin + seconds))
        axes.set(xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5), xlabel="milliseconds")
        axes.set_yticks(range(len(lanes)), [f"stage {stage}" for stage in lanes])
        used = {share for events in timeline.stages.values() for share, *_ in events}
        _name_colours(figure, {name: colour for name, colour in SHARES.items() if name in used})
    return figure


def _name_colours(figure: Figure, colours: Mapping[str, str]) -> None:
    handles = [Patch(color=colour, label=name.replace("_", " for ")) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)
