"""The answer of ``adl-dist plan``, as lines and as plain values."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adl_dist.partition import Chain, Machine, UnitCost
from adl_dist.partition.costs import Profile, update_seconds
from adl_dist.partition.predict import AS_GOOD, Alternative, Prediction
from adl_dist.report.tables import text_table


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements, the predictions, and the advice."""

    machine: Machine
    profile: Profile  # with the configured M
    other: Alternative
    predictions: list[Prediction]  # of each method and K
    chain: Chain
    coded: list[Prediction]  # of the configured method, by K and codec; empty: no links are described
    refused: list[str]
    line: str | None  # the recommended command, or None without a pipeline
    reason: str


def lines_of(plan: Plan, *, with_units: bool) -> list[str]:
    """Return the measurement, predictions, the alternative and the advice."""
    profile, machine, other, spec = plan.profile, plan.machine, plan.other, plan.profile.of
    unit, rates, waits = spec["unit"], machine.bandwidth, machine.latency
    links = zip(*([one] if isinstance(one, int | float) else one for one in (rates, waits)), strict=True)
    shown = "; ".join(f"{rate / 1e9:.3g} GB/s, latency {1e6 * wait:.0f} us" for rate, wait in links)
    lines = [
        f"{spec['units']} units ({spec['granularity']}), {spec['parameters']:,} parameters, "
        f"input {spec['input']}, micro-batches of {spec['micro_batch_size']}, {spec['dtype']}, {spec['device']}, "
        f"{spec['threads']} thread(s), torch {spec['torch']}",
        f"one micro-batch: forward {1000 * profile.forward:.1f} ms, backward {1000 * profile.backward:.1f} ms; one "
        f"update {1000 * update_seconds(profile.units):.2f} ms",
        f"method.split_backward can defer {profile.share_deferrable:.0%} of the backward: gradients of the weights of "
        "linear layers and convolutions",
        f"{'link of each process' if machine.shares_link else 'link'}: {shown}",
    ]
    if with_units:
        head = ("unit", "block", "forward ms", "backward ms", "parameters kB", "activations kB", "crosses kB")
        blocks = [plan.chain.block_names[number] for number in plan.chain.blocks]
        lines += ["", *text_table([head, *map(_unit_row, profile.units, blocks)])]
    if plan.predictions:
        columns = ["method", "K", "M", f"{unit}/s", "speed-up", "bubble", "staleness mean", "factor"]
        columns += ["memory per stage (MB)", "units per stage"]
        lines += ["", *text_table([columns, *(_method_row(p, other) for p in plan.predictions)])]
    lines += [
        "",
        f"without a pipeline: one device {other.single:,.0f} {unit}/s, {other.bytes / 1e6:,.0f} MB"
        + ("" if other.fits else " (does not fit)")
        + f"; DDP on {other.num_devices}: {other.ddp:,.0f} {unit}/s (estimated)",
        "speed-up: over BP of the whole batch on one device. factor: (1 + sum of mean staleness / M) / M, Theorem 1.",
        *(f"not possible: {reason}" for reason in plan.refused),
        *(codec_lines(plan.coded, unit) if plan.coded else []),
        "",
        f"recommended  {plan.reason}",
    ]
    return lines if plan.line is None else [*lines, f"             {plan.line}"]


def codec_lines(coded: Sequence[Prediction], unit: str) -> list[str]:
    """Return the codec table of the configured method, with a recommendation.

    Speeds are in ``unit``/s.
    """
    rows: list[list[object]] = []
    for p in coded:
        where = p.pipeline.num_stages, p.pipeline.micro_batches_per_update, p.codecs.activations
        seconds = f"{p.seconds_per_update:.3g}", f"{p.images_per_second:,.0f}"
        rows.append([*where, f"{p.update_bytes / 1e6:,.2f}", *seconds, f"{p.link_share:.0%}", _sizes(p)])
    head = ["K", "M", "codec", "MB/update", "s/update", f"{unit}/s", "links add", "units per stage"]
    lines = [
        f"{coded[0].pipeline.method.name} by codec, over these links:",
        *text_table([head, *rows]),
    ]
    for K in dict.fromkeys(p.pipeline.num_stages for p in coded):
        alike = [p for p in coded if p.pipeline.num_stages == K]
        # Of all that are as fast as the fastest, take the most exact one.
        most = (1 - AS_GOOD) * max(p.images_per_second for p in alike)
        chosen = next(p for p in alike if p.images_per_second >= most)
        codec = chosen.codecs.activations
        told = "no codec is needed" if codec == "none" else f"runtime.codec={codec} is needed, and enough"
        if not chosen.is_compute_bound:
            told = f"{'no codec' if codec == 'none' else f'runtime.codec={codec}'} is best; longer delays "
            told += "(method.delay=auto, and a larger method.max_staleness) or a larger M may help"
        lines.append(f"K = {K}: {told}: the links add {chosen.link_share:.0%}")
    return ["", *lines]


def _sizes(p: Prediction) -> str:
    return " ".join(map(str, p.balance.sizes))


def _method_row(p: Prediction, other: Alternative) -> list[object]:
    return [
        *(p.pipeline.method.name, p.pipeline.num_stages, p.pipeline.micro_batches_per_update),
        f"{p.images_per_second:,.0f}",
        f"{p.images_per_second / other.single:.2f}",
        f"{p.bubble:.1%}",
        "/".join(f"{s:.3g}" for s in p.staleness_mean),
        f"{p.convergence_factor:.3g}",
        " ".join(f"{b / 1e6:.0f}" for b in p.balance.stage_bytes),
        _sizes(p),
    ]


def _unit_row(unit: UnitCost, block: str) -> list[str]:
    return [
        unit.name[:41],
        block[:41],
        f"{1000 * unit.forward:.3f}",
        f"{1000 * unit.backward:.3f}",
        f"{unit.parameter_bytes / 1e3:,.0f}",
        f"{unit.activation_bytes / 1e3:,.0f}",
        f"{unit.act_bytes / 1e3:,.0f} ({unit.num_tensors})" if unit.may_cut else "no cut",
    ]


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return ``plan`` as plain values, for JSON."""
    return {
        "profile": asdict(plan.profile),
        "machine": asdict(plan.machine),
        "predictions": list(map(_plain, plan.predictions)),
        "refused": plan.refused,
        "coded": list(map(_plain, plan.coded)),
        "alternative": asdict(plan.other),
        "recommended": plan.line,
        "reason": plan.reason,
    }


def _plain(p: Prediction) -> dict[str, Any]:
    facts = {**asdict(p), "convergence_factor": p.convergence_factor}
    del facts["pipeline"]
    return {"method": p.pipeline.method.settings, "num_stages": p.pipeline.num_stages, **facts}
