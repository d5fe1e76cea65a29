"""What ``adl-dist bench`` prints and draws."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adl_dist.cli.bench.entries import BASELINE, OF_TORCH, Entry, Traffic
from adl_dist.cli.bench.runner import Measured
from adl_dist.report.bars import Bar, draw_bars

HEAD = (
    "contender",
    "K",
    "M",
    "threads",
    "images/s",
    "least .. most",
    "ratio",
    "to our bp",
    "peak memory (MiB)",
    "busy",
    "kB/image",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender and what its runs have shown.

    Attributes:
        contender: of the row.
        speeds: images per second of each run.
        bytes_per_image: that it sends, computed.
        peak_memory_bytes: of each process, the most of all runs.
        busy_share: of each stage, the median of all runs; None: it is not known.
        error: of the run that failed.
    """

    contender: Entry
    speeds: Sequence[float]
    bytes_per_image: float
    peak_memory_bytes: Sequence[int]
    busy_share: Sequence[float] | None
    error: str | None

    @property
    def median(self) -> float:
        """Of the speeds, of which there is at least one."""
        return statistics.median(self.speeds)


def rows(entries: Sequence[Entry], runs: Sequence[Measured], traffic: Traffic) -> list[Row]:
    """One row for each contender, in their order."""
    return [_row(each, [run for run in runs if run.contender == each.name], traffic) for each in entries]


def baseline(table: Sequence[Row]) -> Row | None:
    """The faster form of plain backpropagation on one device; None: neither was measured."""
    known = [row for row in table if row.contender.name in BASELINE and row.speeds]
    return max(known, key=lambda row: row.median, default=None)


def ratio(row: Row, of: Row | None) -> float | None:
    """Its median over that of another; None: one of the two is not there."""
    return row.median / of.median if of is not None and of.speeds and row.speeds else None


def our_bp(table: Sequence[Row]) -> Row | None:
    """Backpropagation in our own engine, on one device."""
    return next((row for row in table if row.contender.name == "bp"), None)


def report(table: Sequence[Row], left_out: Mapping[str, str], *, is_gpu: bool) -> str:
    """The table for people, and what its columns mean."""
    of, ours = baseline(table), our_bp(table)
    cells = [list(HEAD), *[_cells(row, ratio(row, of), ratio(row, ours)) for row in table]]
    widths = [max(len(line[column]) for line in cells if column < len(line)) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in cells]
    lines += ["", _told_of_ratio(of)]
    lines.append(
        "to our bp: ours keep what the C library would give back to the kernel (adl_dist/distributed/affinity.py), "
        "torch's do not; this column is without that gain"
    )
    lines.append("peak memory: of each process, " + ("allocated on its GPU" if is_gpu else "resident"))
    does = "launches what its GPU computes" if is_gpu else "computes"
    lines.append(f"busy: share of the time in which each stage {does}; of torch's it is not known")
    lines.append(
        "kB/image: sent by all processes together, computed from the shapes that cross; of DDP as a ring does it, "
        "2 (K-1)/K of the parameters' bytes per process and update"
    )
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    lines += [f"failed: {row.contender.name}: {row.error}" for row in table if row.error is not None]
    return "\n".join(lines)


def facts_of(row: Row, table: Sequence[Row]) -> dict[str, Any]:
    """A row as plain values; what is not known is absent."""
    contender = row.contender
    facts: dict[str, Any] = {
        "contender": contender.name,
        "num_processes": contender.num_processes,
        "accumulation_steps": contender.micro_batches,
        "threads": contender.threads,
        "samples_per_update": contender.samples,
        "warmup_updates": contender.warmup,
        "images_per_second": list(row.speeds),
        "bytes_per_image_computed": row.bytes_per_image,
    }
    if contender.method is not None:
        facts["method"] = contender.method.settings
    if row.speeds:
        facts |= {"median": row.median, "least": min(row.speeds), "most": max(row.speeds)}
        facts["peak_memory_bytes"] = list(row.peak_memory_bytes)
    for name, of in (("ratio_to_baseline", baseline(table)), ("ratio_to_our_bp", our_bp(table))):
        if (times := ratio(row, of)) is not None:
            facts[name] = times
    if row.busy_share is not None:
        facts["busy_share"] = list(row.busy_share)
    if row.error is not None:
        facts["error"] = row.error
    return facts


def draw(path: Path, table: Sequence[Row], *, title: str) -> None:
    """Draw the rows that were measured, if there are any."""
    bars = [
        Bar(
            label=row.contender.name,
            group="torch" if row.contender.name in OF_TORCH else "adl_dist",
            median=row.median,
            least=min(row.speeds),
            most=max(row.speeds),
        )
        for row in table
        if row.speeds
    ]
    if bars:
        of = baseline(table)
        draw_bars(path, bars, reference=None if of is None else of.median, title=title)


def _row(contender: Entry, runs: Sequence[Measured], traffic: Traffic) -> Row:
    done = [run for run in runs if run.error is None]
    shares = [run.busy_share for run in done if run.busy_share is not None]
    return Row(
        contender=contender,
        speeds=[run.images_per_second for run in done],
        bytes_per_image=traffic.per_image(contender),
        peak_memory_bytes=[max(each) for each in zip(*(run.peak_memory_bytes for run in done), strict=True)],
        busy_share=[statistics.median(each) for each in zip(*shares, strict=True)] if shares else None,
        error=next((run.error for run in runs if run.error is not None), None),
    )


def _cells(row: Row, times: float | None, to_ours: float | None) -> list[str]:
    contender = row.contender
    head = [contender.name, str(contender.num_processes), str(contender.micro_batches), str(contender.threads)]
    if not row.speeds:
        return [*head, "failed" if row.error else "not run"]
    return [
        *head,
        f"{row.median:,.1f}",
        f"{min(row.speeds):,.1f} .. {max(row.speeds):,.1f}",
        "-" if times is None else f"{times:.2f}",
        "-" if to_ours is None else f"{to_ours:.2f}",
        " ".join(f"{each / 2**20:,.0f}" for each in row.peak_memory_bytes),
        "-" if row.busy_share is None else " ".join(f"{share:.0%}" for share in row.busy_share),
        f"{row.bytes_per_image / 1e3:,.1f}",
    ]


def _told_of_ratio(of: Row | None) -> str:
    if of is None:
        return f"ratio: there is none, for neither {' nor '.join(BASELINE)} was measured"
    return (
        f"ratio: of medians, to {of.contender.name}, the faster of {' and '.join(BASELINE)} as far as both were "
        f"measured: one process, {of.contender.threads} thread{'s' * (of.contender.threads > 1)}"
    )
