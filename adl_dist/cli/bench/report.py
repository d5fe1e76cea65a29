"""The table and the figure of ``adl-dist bench``."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from adl_dist.cli.bench.entries import BASELINE, OF_TORCH, Entry, ModelSurvey
from adl_dist.cli.bench.runner import Measured
from adl_dist.report.curves import COLOURS, STYLE, save_figure
from adl_dist.report.tables import text_table

HEAD = (
    *("contender", "K", "M", "threads", "images/s", "least .. most", "ratio", "predicted", "measured/predicted"),
    *("peak memory (MiB)", "busy", "kB/image"),
)
BAR_INCHES, WIDTH_INCHES = 0.27, 6.5

Row = dict[str, Any]  # plain values, as bench.json has them; what is unknown is missing


def rows(able: Sequence[Entry], runs: Sequence[Measured], survey: ModelSurvey) -> list[Row]:
    """Return one row for each entry, in their order."""
    table = [_row(entry, [run for run in runs if run.contender == entry.name], survey) for entry in able]
    reference = baseline(table)
    for row in table:
        if reference is not None and "median" in row:
            row["ratio_to_baseline"] = row["median"] / reference["median"]
    return table


def _row(entry: Entry, runs: Sequence[Measured], survey: ModelSurvey) -> Row:
    done = [run for run in runs if run.error is None]
    speeds, shares = [run.images_per_second for run in done], [run.busy_share for run in done if run.busy_share]
    predicted = survey.predicted.get(entry.name)
    row = {
        "contender": entry.name,
        "num_processes": entry.num_processes,
        "accumulation_steps": entry.method.micro_batches_per_update,
        "threads": entry.threads,
        "samples_per_update": entry.samples,
        "warmup_updates": entry.warmup,
        "method": entry.method.settings if entry.kind == "ours" else None,
        "images_per_second": speeds,
        "bytes_per_image_computed": survey.bytes_per_image(entry),
        "predicted_images_per_second": predicted,
        "busy_share": [statistics.median(stage) for stage in zip(*shares, strict=True)] or None,
        "error": next((run.error for run in runs if run.error is not None), None),
    }
    if speeds:
        median = statistics.median(speeds)
        row |= {"median": median, "least": min(speeds), "most": max(speeds)}
        row["measured_to_predicted"] = median / predicted if predicted else None
        row["peak_memory_bytes"] = [max(each) for each in zip(*(run.peak_memory_bytes for run in done), strict=True)]
    return {name: value for name, value in row.items() if value is not None}


def baseline(table: Sequence[Row]) -> Row | None:
    """Return the faster row of plain backpropagation, or None without one."""
    known = [row for row in table if row["contender"] in BASELINE and "median" in row]
    return max(known, key=lambda row: row["median"], default=None)


def report(table: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """Return the table for people; docs/bench.md explains its columns."""
    lines, reference = [*text_table([HEAD, *map(_cells, table)]), ""], baseline(table)
    if reference is None:
        lines += [f"ratio: there is none, for neither {' nor '.join(BASELINE)} was measured"]
    else:
        threads = reference["threads"]
        lines += [
            f"ratio: of medians, to {reference['contender']}, the faster of {' and '.join(BASELINE)} as far as both "
            f"were measured: one process, {threads} thread{'s' * (threads > 1)}",
        ]
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    lines += [f"failed: {row['contender']}: {row['error']}" for row in table if "error" in row]
    return "\n".join(lines)


def _cells(row: Row) -> list[object]:
    head = [row[name] for name in ("contender", "num_processes", "accumulation_steps", "threads")]
    if "median" not in row:
        return [*head, "failed" if "error" in row else "not run", *[""] * (len(HEAD) - len(head) - 1)]

    def known(name: str, form: str) -> str:
        return format(row[name], form) if name in row else "-"

    return [
        *head,
        known("median", ",.1f"),
        f"{row['least']:,.1f} .. {row['most']:,.1f}",
        known("ratio_to_baseline", ".2f"),
        known("predicted_images_per_second", ",.1f"),
        known("measured_to_predicted", ".2f"),
        " ".join(f"{each / 2**20:,.0f}" for each in row["peak_memory_bytes"]),
        " ".join(f"{share:.0%}" for share in row["busy_share"]) if "busy_share" in row else "-",
        f"{row['bytes_per_image_computed'] / 1e3:,.1f}",
    ]


def draw(path: Path, table: Sequence[Row], *, title: str) -> None:
    """Draw the median of each measured row, with the range as a whisker."""
    measured = [row for row in table if "median" in row]
    if not measured:
        return
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, BAR_INCHES * len(measured) + 1.2), layout="constrained")
        axes = figure.subplots()
        groups = ["torch" if row["contender"] in OF_TORCH else "adl_dist" for row in measured]
        axes.barh(
            range(len(measured)),
            [row["median"] for row in measured],
            xerr=[
                [row["median"] - row["least"] for row in measured],
                [row["most"] - row["median"] for row in measured],
            ],
            color=[COLOURS[group == "adl_dist"] for group in groups],
            height=0.7,
            label=["" if group in groups[:i] else group for i, group in enumerate(groups)],
            error_kw={"ecolor": "#333333", "elinewidth": 1.0, "capsize": 2.0},
        )
        if (reference := baseline(table)) is not None:
            axes.axvline(reference["median"], color="#333333", linestyle="--", linewidth=1.0, label="reference")
        axes.set_yticks(range(len(measured)), [row["contender"] for row in measured])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("images/s, median (least to most)")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
