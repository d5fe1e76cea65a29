"""The table and the figure of ``adl-dist bench``."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from adl_dist.cli.bench.entries import BASELINE, OF_TORCH, Entry, ModelSurvey
from adl_dist.cli.bench.runner import Measured
from adl_dist.report.curves import COLOURS, STYLE, save_figure

HEAD = (
    *("contender", "K", "M", "threads", "images/s", "least .. most", "ratio", "predicted", "measured/predicted"),
    *("peak memory (MiB)", "busy", "kB/image"),
)
BAR_INCHES, WIDTH_INCHES = 0.27, 6.5


@dataclass(frozen=True, kw_only=True)
class Row:
    """An entry and the results of its runs.

    Attributes:
        entry: the entry.
        speeds: images per second of each run.
        predicted: images per second; None: not predicted.
        bytes_per_image: bytes sent, computed.
        peak_memory_bytes: for each process, the most of all runs.
        busy_share: for each stage, the median of all runs; None: unknown.
        error: the error of the run that failed; None: none did.
    """

    entry: Entry
    speeds: Sequence[float]
    predicted: float | None
    bytes_per_image: float
    peak_memory_bytes: Sequence[int]
    busy_share: Sequence[float] | None
    error: str | None

    @property
    def median(self) -> float:
        """The median of the speeds, of which there is at least one."""
        return statistics.median(self.speeds)

    @property
    def accuracy(self) -> float | None:
        """Measured over predicted images per second; None: one of the two is missing."""
        return self.median / self.predicted if self.speeds and self.predicted else None


def rows(able: Sequence[Entry], runs: Sequence[Measured], survey: ModelSurvey) -> list[Row]:
    """Return one row for each entry, in their order."""
    return [_row(entry, [run for run in runs if run.contender == entry.name], survey) for entry in able]


def baseline(table: Sequence[Row]) -> Row | None:
    """Return the faster form of plain backpropagation on one device; None: neither was measured."""
    known = [row for row in table if row.entry.name in BASELINE and row.speeds]
    return max(known, key=lambda row: row.median, default=None)


def ratio(row: Row, reference: Row | None) -> float | None:
    """Return the ratio of two medians; None: one of the two is missing."""
    return row.median / reference.median if reference is not None and row.speeds else None


def report(table: Sequence[Row], left_out: Mapping[str, str], *, is_gpu: bool) -> str:
    """Return the table for people, with an explanation of its columns."""
    reference = baseline(table)
    cells = [list(HEAD), *[_cells(row, ratio(row, reference)) for row in table]]
    widths = [max(len(line[column]) for line in cells if column < len(line)) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in cells]
    if reference is None:
        lines += ["", f"ratio: there is none, for neither {' nor '.join(BASELINE)} was measured"]
    else:
        threads = reference.entry.threads
        lines += [
            "",
            f"ratio: of medians, to {reference.entry.name}, the faster of {' and '.join(BASELINE)} as far as both were "
            f"measured: one process, {threads} thread{'s' * (threads > 1)}",
        ]
    computing = "launches what its GPU computes" if is_gpu else "computes"
    lines += [
        "predicted: images/s by the measured costs of each unit and the schedule, as adl-dist plan predicts them",
        "peak memory: for each process, " + ("allocated on its GPU" if is_gpu else "resident"),
        f"busy: share of the time in which each stage {computing}; unknown for torch's",
        "kB/image: sent by all processes together, computed from the shapes that cross; for DDP by its ring, "
        "2 (K-1)/K of the parameters' bytes per process and update",
    ]
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    lines += [f"failed: {row.entry.name}: {row.error}" for row in table if row.error is not None]
    return "\n".join(lines)


def facts_of(row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """Return a row as plain values, without those that are unknown."""
    entry = row.entry
    facts: dict[str, Any] = {
        "contender": entry.name,
        "num_processes": entry.num_processes,
        "accumulation_steps": entry.micro_batches,
        "threads": entry.threads,
        "samples_per_update": entry.samples,
        "warmup_updates": entry.warmup,
        "method": entry.method.settings if entry.kind == "ours" else None,
        "images_per_second": list(row.speeds),
        "bytes_per_image_computed": row.bytes_per_image,
        "ratio_to_baseline": ratio(row, baseline(table)),
        "predicted_images_per_second": row.predicted,
        "measured_to_predicted": row.accuracy,
        "busy_share": row.busy_share and list(row.busy_share),
        "error": row.error,
    }
    if row.speeds:
        facts |= {"median": row.median, "least": min(row.speeds), "most": max(row.speeds)}
        facts["peak_memory_bytes"] = list(row.peak_memory_bytes)
    return {name: value for name, value in facts.items() if value is not None}


def draw(path: Path, table: Sequence[Row], *, title: str) -> None:
    """Draw a bar for each measured row: its median, with the least and the most as a whisker; none: no figure."""
    measured = [row for row in table if row.speeds]
    if not measured:
        return
    places = range(len(measured))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, BAR_INCHES * len(measured) + 1.2), layout="constrained")
        axes = figure.subplots()
        for colour, (group, of_torch) in zip(COLOURS, (("torch", True), ("adl_dist", False)), strict=False):
            bars = [
                (place, row)
                for place, row in zip(places, measured, strict=True)
                if of_torch == (row.entry.name in OF_TORCH)
            ]
            if not bars:
                continue
            axes.barh(
                [place for place, _ in bars],
                [row.median for _, row in bars],
                xerr=[[r.median - min(r.speeds) for _, r in bars], [max(r.speeds) - r.median for _, r in bars]],
                color=colour,
                height=0.7,
                label=group,
                error_kw={"ecolor": "#333333", "elinewidth": 1.0, "capsize": 2.0},
            )
        if (reference := baseline(table)) is not None:
            axes.axvline(reference.median, color="#333333", linestyle="--", linewidth=1.0, label="reference")
        axes.set_yticks(places, [row.entry.name for row in measured])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("images/s, median (least to most)")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def _row(entry: Entry, runs: Sequence[Measured], survey: ModelSurvey) -> Row:
    done = [run for run in runs if run.error is None]
    shares = [run.busy_share for run in done if run.busy_share is not None]
    return Row(
        entry=entry,
        speeds=[run.images_per_second for run in done],
        predicted=survey.predicted.get(entry.name),
        bytes_per_image=survey.traffic.per_image(entry),
        peak_memory_bytes=[max(each) for each in zip(*(run.peak_memory_bytes for run in done), strict=True)],
        busy_share=[statistics.median(each) for each in zip(*shares, strict=True)] if shares else None,
        error=next((run.error for run in runs if run.error is not None), None),
    )


def _cells(row: Row, times: float | None) -> list[str]:
    entry = row.entry
    head = [entry.name, str(entry.num_processes), str(entry.micro_batches), str(entry.threads)]
    if not row.speeds:
        return [*head, "failed" if row.error else "not run"]
    return [
        *head,
        f"{row.median:,.1f}",
        f"{min(row.speeds):,.1f} .. {max(row.speeds):,.1f}",
        "-" if times is None else f"{times:.2f}",
        "-" if row.predicted is None else f"{row.predicted:,.1f}",
        "-" if row.accuracy is None else f"{row.accuracy:.2f}",
        " ".join(f"{each / 2**20:,.0f}" for each in row.peak_memory_bytes),
        "-" if row.busy_share is None else " ".join(f"{share:.0%}" for share in row.busy_share),
        f"{row.bytes_per_image / 1e3:,.1f}",
    ]
