"""What ``adl-dist plan`` prints."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from adl_dist.cli.config.methods import method_words
from adl_dist.partition import Machine
from adl_dist.partition.advice import Alternative
from adl_dist.partition.predict import Prediction
from adl_dist.partition.profile import Profile


def report(
    profile: Profile,
    machine: Machine,
    predictions: Sequence[Prediction],
    refused: Sequence[str],
    other: Alternative,
    *,
    with_units: bool,
) -> str:
    """Tables for people: what was measured, what each method would do, and what the devices would do without."""
    of = profile.of
    lines = [
        f"{of['units']} units ({of['granularity']} grain), {of['parameters']:,} parameters, input {of['input']}, "
        f"micro-batches of {of['micro_batch_size']}, {of['dtype']}, {of['device']}, {of['threads']} thread(s), "
        f"torch {of['torch']}",
        f"one micro-batch: forward {1000 * profile.forward:.1f} ms, backward {1000 * profile.backward:.1f} ms; one "
        f"update {1000 * sum(u.update for u in profile.units):.2f} ms",
        f"link: {machine.bandwidth / 1e9:.2f} GB/s, latency {1e6 * machine.latency:.0f} us",
    ]
    if with_units:
        lines += ["", *_unit_table(profile)]
    lines += [
        "",
        "method     K  M   images/s  speed-up  bubble  staleness mean  factor  memory per stage (MB)   units per stage",
    ]
    for p in predictions:
        memory = " ".join(f"{b / 1e6:.0f}" for b in p.balance.stage_bytes)
        sizes = " ".join(map(str, p.balance.sizes))
        stale = "/".join(f"{s:.3g}" for s in p.staleness_mean)
        lines.append(
            f"{p.pipeline.method.name:<10} {p.pipeline.num_stages:<2} {p.pipeline.micro_batches_per_update:<3} "
            f"{p.images_per_second:<9,.0f} {p.images_per_second / other.single:<9.2f} {p.bubble:<7.1%} {stale:<15} "
            f"{p.convergence_factor:<7.3g} {memory:<23} {sizes}"
        )
    lines += [
        "",
        f"without a pipeline: one device {other.single:,.0f} images/s, {other.bytes / 1e6:,.0f} MB"
        + ("" if other.fits else " (does not fit)")
        + f"; DDP on {other.num_devices}: {other.ddp:,.0f} images/s (estimated)",
        "speed-up: over BP of the whole batch on one device. factor: (1 + sum of mean staleness / M) / M, Theorem 1.",
    ]
    lines += [f"not possible: {reason}" for reason in refused]
    return "\n".join(lines)


def _unit_table(profile: Profile) -> Iterator[str]:
    yield "unit                                      forward ms  backward ms  parameters kB  activations kB  crosses kB"
    for unit in profile.units:
        cut = f"{unit.act_bytes / 1e3:,.0f} ({unit.num_tensors})" if unit.may_cut else "no cut"
        yield (
            f"{unit.name[:41]:<42}{1000 * unit.forward:<12.3f}{1000 * unit.backward:<13.3f}"
            f"{unit.parameter_bytes / 1e3:<15,.0f}{unit.activation_bytes / 1e3:<16,.0f}{cut}"
        )


def facts_of(p: Prediction) -> dict[str, Any]:
    """A prediction as plain values."""
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
    """The command that trains as predicted."""
    words = [word for word in overrides if not word.lstrip("+~").startswith(("method", "partition"))]
    words += method_words(choice.pipeline.method)
    words += [f"partition.num_stages={choice.pipeline.num_stages}", f"partition.granularity={granularity}"]
    words += [f"partition.balance=[{','.join(map(str, choice.balance.sizes))}]"]
    return f"adl-dist train {shlex.join(words)}"
