"""Format what ``adl-dist plan`` prints."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from adl_dist.cli.config.methods import method_words
from adl_dist.partition import Machine, UnitCost
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import Alternative, Prediction
from adl_dist.report.tables import text_table

METHOD_HEAD = (
    *("method", "K", "M", "images/s", "speed-up", "bubble", "staleness mean", "factor"),
    *("memory per stage (MB)", "units per stage"),
)
UNIT_HEAD = ("unit", "forward ms", "backward ms", "parameters kB", "activations kB", "crosses kB")


def report(
    profile: Profile,
    machine: Machine,
    predictions: Sequence[Prediction],
    refused: Sequence[str],
    other: Alternative,
    *,
    with_units: bool,
) -> str:
    """Return tables of the measurement, of each method's prediction, and of the devices without a pipeline."""
    spec = profile.of
    lines = [
        f"{spec['units']} units ({spec['granularity']}), {spec['parameters']:,} parameters, "
        f"input {spec['input']}, micro-batches of {spec['micro_batch_size']}, {spec['dtype']}, {spec['device']}, "
        f"{spec['threads']} thread(s), torch {spec['torch']}",
        f"one micro-batch: forward {1000 * profile.forward:.1f} ms, backward {1000 * profile.backward:.1f} ms; one "
        f"update {1000 * sum(u.update for u in profile.units):.2f} ms",
        f"link: {machine.bandwidth / 1e9:.2f} GB/s, latency {1e6 * machine.latency:.0f} us",
    ]
    if with_units:
        lines += ["", *text_table([UNIT_HEAD, *map(_unit_row, profile.units)])]
    lines += ["", *text_table([METHOD_HEAD, *(_method_row(p, other) for p in predictions)])]
    lines += [
        "",
        f"without a pipeline: one device {other.single:,.0f} images/s, {other.bytes / 1e6:,.0f} MB"
        + ("" if other.fits else " (does not fit)")
        + f"; DDP on {other.num_devices}: {other.ddp:,.0f} images/s (estimated)",
        "speed-up: over BP of the whole batch on one device. factor: (1 + sum of mean staleness / M) / M, Theorem 1.",
    ]
    lines += [f"not possible: {reason}" for reason in refused]
    return "\n".join(lines)


def _method_row(p: Prediction, other: Alternative) -> list[str]:
    return [
        p.pipeline.method.name,
        str(p.pipeline.num_stages),
        str(p.pipeline.micro_batches_per_update),
        f"{p.images_per_second:,.0f}",
        f"{p.images_per_second / other.single:.2f}",
        f"{p.bubble:.1%}",
        "/".join(f"{s:.3g}" for s in p.staleness_mean),
        f"{p.convergence_factor:.3g}",
        " ".join(f"{b / 1e6:.0f}" for b in p.balance.stage_bytes),
        " ".join(map(str, p.balance.sizes)),
    ]


def _unit_row(unit: UnitCost) -> list[str]:
    return [
        unit.name[:41],
        f"{1000 * unit.forward:.3f}",
        f"{1000 * unit.backward:.3f}",
        f"{unit.parameter_bytes / 1e3:,.0f}",
        f"{unit.activation_bytes / 1e3:,.0f}",
        f"{unit.act_bytes / 1e3:,.0f} ({unit.num_tensors})" if unit.may_cut else "no cut",
    ]


def facts_of(p: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values."""
    return {
        "method": p.pipeline.method.settings,
        "num_stages": p.pipeline.num_stages,
        "balance": asdict(p.balance),
        "images_per_second": p.images_per_second,
        "speed_up": p.speed_up,
        "bubble": p.bubble,
        "staleness_mean": p.staleness_mean,
        "convergence_factor": p.convergence_factor,
    }


def line_to_paste(choice: Prediction, granularity: str, overrides: Sequence[str]) -> str:
    """Return the command that trains as predicted."""
    words = [word for word in overrides if not word.lstrip("+~").startswith(("method", "partition"))]
    words += method_words(choice.pipeline.method)
    words += [f"partition.num_stages={choice.pipeline.num_stages}", f"partition.granularity={granularity}"]
    words += [f"partition.balance=[{','.join(map(str, choice.balance.sizes))}]"]
    return f"adl-dist train {shlex.join(words)}"
