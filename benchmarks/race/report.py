"""The table and the figure of a race: the time to the target over each link."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from adl_dist.cli.bench.entries import ModelSurvey
from adl_dist.report.curves import COLOURS, STYLE, STYLES, save_figure
from adl_dist.report.tables import markdown_table
from benchmarks.race.contenders import ONE_DEVICE, REPLICATED, SYNCHRONOUS, Contender
from benchmarks.race.link import Link
from benchmarks.race.seconds import Timings, key_of
from benchmarks.race.updates import UpdatesToTarget

NOTHING = "."
RIVALS: Mapping[str, Sequence[str]] = {
    "one device": [ONE_DEVICE],
    "DDP": [name for name in REPLICATED if name.startswith("ddp")],
    "DiLoCo": [name for name in REPLICATED if name.startswith("diloco")],
    "synchronous pipelines": SYNCHRONOUS,
}
PANEL_INCHES = (4.2, 3.6)
MARKERS = ("o", "s", "^", "D")  # a panel may have single points, of which no line tells the style

Row = dict[str, Any]  # plain values, as race.json has them


def rows(
    links: Sequence[Link],
    racing: Mapping[str, Sequence[Contender]],
    found: Mapping[str, UpdatesToTarget],
    timings: Timings,
    survey: ModelSurvey | None,
    predicted: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """Return one row for each contender; ``racing`` are those over each link, in the same order.

    ``predicted``: seconds per update of ours, by link and contender.
    """
    return [
        _row([(link, racing[link.name][place]) for link in links], found, timings, survey, predicted)
        for place in range(len(racing[links[0].name]))
    ]


def _row(
    over: Sequence[tuple[Link, Contender]],
    found: Mapping[str, UpdatesToTarget],
    timings: Timings,
    survey: ModelSurvey | None,
    predicted: Mapping[str, Mapping[str, float]],
) -> Row:
    contender = over[0][1]
    entry = contender.entry
    is_plain = contender.codec == "none"
    row: Row = {
        "contender": contender.name,
        "num_processes": entry.num_processes,
        "accumulation_steps": entry.method.micro_batches_per_update,
        "samples_per_update": entry.samples,
        "bytes_per_update": survey.bytes_per_image(entry) * entry.samples if survey and is_plain else None,
        "links": {},
    }
    for link, one in over:
        updates, seconds = found.get(one.values.name), timings.seconds(key_of(one, link))
        cell: Row = {"values": one.values.name, "method": one.entry.method.settings if entry.kind == "ours" else None}
        if (expected := predicted.get(link.name, {}).get(one.name)) is not None:
            cell["predicted_seconds_per_update"] = expected
        if updates is not None:
            cell |= {name: getattr(updates, name) for name in ("rate", "at_edge", "updates", "best", "trials")}
        if seconds:
            cell |= {"seconds_per_update": seconds, "median_seconds_per_update": statistics.median(seconds)}
        if seconds and updates is not None and math.isfinite(updates.median):
            each = [u * cell["median_seconds_per_update"] for u in updates.updates if u is not None]
            cell |= {"seconds_to_target": updates.median * cell["median_seconds_per_update"]}
            cell |= {"least": min(each), "most": max(each), "reached": len(each)}
        row["links"][link.name] = cell
    return row


def report(table: Sequence[Row], links: Sequence[Link], target: str, num_seeds: int) -> str:
    """Return the tables in Markdown, and a sentence on each link."""
    head = ["contender", *(link.name for link in links)]
    best = {link.name: min((_time(row, link) for row in table), default=math.inf) for link in links}
    times = [head, *([row["contender"], *(_time_cell(row, link, best[link.name]) for link in links)] for row in table)]
    parts = [["K", "M", "rate", "updates to target", "MB/update", *(f"s/update {link.name}" for link in links)]]
    parts[0].insert(0, "contender")
    parts += [_parts(row, links) for row in table]
    notes = [
        f"Time to a {target}: updates until a validation first met it (median over {num_seeds} seeds, each after a "
        "whole epoch) times the seconds of an update, measured with every rank in a network namespace of its own "
        "behind the link. In brackets: the least and the most over the seeds; then how many did not get there. "
        "Evaluating and saving do not count.",
        "The rate of each was tuned with the first seed, with as many trials for all; `!`: the best one is the least "
        "or the largest that was tried. Delays that follow from the link have updates of their own for each link. "
        "In brackets behind the seconds of an update: what `adl-dist plan` predicts of it.",
    ]
    sentences = [line for link in links if (line := _sentence(table, link))]
    return "\n\n".join(
        ["\n".join(markdown_table(times)), notes[0], *sentences, "\n".join(markdown_table(parts)), notes[1]]
    )


def _time(row: Row, link: Link) -> float:
    return float(row["links"][link.name].get("seconds_to_target", math.inf))


def _time_cell(row: Row, link: Link, best: float) -> str:
    cell = row["links"][link.name]
    if "seconds_to_target" not in cell:
        if cell.get("updates") and not math.isfinite(_median(cell)):
            reached = sum(u is not None for u in cell["updates"])
            return f"not reached ({reached} of {len(cell['updates'])} seeds)"
        return NOTHING
    text = f"{_clock(cell['seconds_to_target'])} ({_clock(cell['least'])} to {_clock(cell['most'])})"
    if (missing := len(cell["updates"]) - cell["reached"]) > 0:
        text += f", {missing} not"
    return f"**{text}**" if cell["seconds_to_target"] == best else text


def _parts(row: Row, links: Sequence[Link]) -> list[str]:
    cells = [row["links"][link.name] for link in links]
    rates = dict.fromkeys(f"{c['rate']:g}{'!' * c['at_edge']}" for c in cells if c.get("rate") is not None)
    updates = dict.fromkeys(_updates(c) for c in cells if "updates" in c)
    sent = row["bytes_per_update"]
    seconds = [_seconds_cell(cell) for cell in cells]
    return [
        row["contender"],
        str(row["num_processes"]),
        str(row["accumulation_steps"]),
        " / ".join(rates) or NOTHING,
        " / ".join(updates) or NOTHING,
        NOTHING if sent is None else f"{sent / 1e6:,.2f}",
        *seconds,
    ]


def _seconds_cell(cell: Row) -> str:
    if "seconds_per_update" not in cell:
        return NOTHING
    text, expected = f"{cell['median_seconds_per_update']:.3f}", cell.get("predicted_seconds_per_update")
    return text if expected is None else f"{text} ({expected:.3f})"


def _median(cell: Row) -> float:
    return statistics.median(math.inf if u is None else u for u in cell["updates"])


def _updates(cell: Row) -> str:
    if not cell["updates"]:
        return NOTHING
    return f"{_median(cell):,.0f}" if math.isfinite(_median(cell)) else "not reached"


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _sentence(table: Sequence[Row], link: Link) -> str | None:
    """Compare the fastest of our asynchronous methods with each kind of rival, or return None without rivals."""
    times = {row["contender"]: _time(row, link) for row in table if math.isfinite(_time(row, link))}

    def soonest(names: Iterable[str]) -> str | None:
        return min((name for name in names if name in times), key=times.__getitem__, default=None)

    ours = soonest(name for name in times if name not in {"bp", *(n for names in RIVALS.values() for n in names)})
    best = {kind: name for kind, names in RIVALS.items() if (name := soonest(names)) is not None}
    if ours is None or not best:
        return None
    against = [f"{name} {times[name] / times[ours]:.2f} (best of {kind})" for kind, name in best.items()]
    return f"{link.name}: {ours} takes {_clock(times[ours])}; times as long: {', '.join(against)}."


def draw(path: Path, table: Sequence[Row], links: Sequence[Link], *, title: str) -> bool:
    """Draw the time to the target against the rate of the link, a panel per round trip; False: there is nothing."""
    shown = [row for row in table if any(math.isfinite(_time(row, link)) for link in links)]
    if not shown:
        return False
    trips = sorted({link.round_trip_seconds for link in links})
    bright = [(colour, *style) for style in zip(STYLES, MARKERS, strict=True) for colour in COLOURS]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(len(trips) * PANEL_INCHES[0] + 1.8, PANEL_INCHES[1]), layout="constrained")
        panels = figure.subplots(1, len(trips), sharey=True, squeeze=False)[0]
        for axes, trip in zip(panels, trips, strict=True):
            here = sorted((k for k in links if k.round_trip_seconds == trip), key=lambda k: k.bits_per_second)
            for (colour, style, marker), row in zip(bright, shown, strict=False):
                points = [(k.bits_per_second / 1e6, _time(row, k)) for k in here if math.isfinite(_time(row, k))]
                looks: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker}
                if row["num_processes"] == 1:
                    looks = {"color": "black", "linestyle": "--", "marker": "o"}
                if points:
                    axes.plot(*zip(*points, strict=True), markersize=4, label=row["contender"], **looks)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks([k.bits_per_second / 1e6 for k in here], [f"{k.bits_per_second / 1e6:g}" for k in here])
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.minorticks_off()
            axes.set_xlabel("link of each rank (Mbit/s)")
            axes.set_title(f"round trip {trip * 1e3:g} ms", loc="left", fontsize="medium")
        panels[0].set_ylabel("time to target (s)")
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend(handles=list(lines.values()), loc="outside right upper", frameon=False, fontsize="small")
    save_figure(figure, path)
    return True
