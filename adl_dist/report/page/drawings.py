"""The figures of a page."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adl_dist.report.curves import COLOURS, STYLE
from adl_dist.report.page.recorded import Point, Recorded
from adl_dist.report.picture import STYLES, measured_picture, picture, scale
from adl_dist.report.timeline import SHARES, Timeline
from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.timing import Costs, Span, in_processes, simulate

MOST_POINTS = 600  # of a curve; more cannot be seen
MOST_MICRO_BATCHES = 48  # of a schedule from its beginning on
MOST_IN_LEGEND = 12  # stages
BINS = 60  # over which a speed is averaged
WIDTH, HEIGHT = 9.6, 2.9  # inches of a row of panels
TRAIN, VALIDATION = COLOURS[0], COLOURS[1]
COLOUR_OF_SHARE = {
    "forward": STYLES[Op.FORWARD][0],
    "backward": STYLES[Op.BACKWARD][0],
    "recompute": STYLES[Op.RECOMPUTE][0],
    "update": "#333333",
    "wait": "#E8E8E8",
    "load, send": "#8C8C8C",
    "other": "#C8C8C8",
}


def learning_curves(run: Recorded, names: Sequence[str]) -> Figure:
    """Draw a row of panels for each of ``names``, by epoch and by seconds."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT * len(names)), layout="constrained")
        rows = figure.subplots(len(names), 2, squeeze=False, sharey="row")
        for (by_epoch, by_time), name in zip(rows, names, strict=True):
            for axes, x, label in ((by_epoch, _epoch, "epoch"), (by_time, _seconds, "seconds of training")):
                _draw_training(axes, run.curves.get(f"train/{name}", ()), x)
                points = _finite(run.curves.get(f"validation/{name}", ()))
                axes.plot([x(p) for p in points], [p.value for p in points], "o-", color=VALIDATION, markersize=3,
                          linewidth=1.4, label="validation")  # fmt: skip
                axes.set_xlabel(label)
            by_epoch.set_ylabel(name)
            values = [
                p.value for kind in ("train", "validation") for p in _finite(run.curves.get(f"{kind}/{name}", ()))
            ]
            _limit(by_epoch, values)
            by_epoch.legend(frameon=False)
    return figure


def throughput(points: Sequence[Point], unit: str) -> Figure:
    """Draw the speed over seconds of training, averaged over updates."""
    size = max(1, -(-len(points) // BINS))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    # Of rates over equal amounts of work the harmonic mean is what that work took altogether.
    values = [statistics.harmonic_mean([max(p.value, 1e-9) for p in part]) for part in parts]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.3), layout="constrained")
        axes = figure.subplots()
        axes.stairs(values, [0.0, *(part[-1].seconds for part in parts)], baseline=None, color=TRAIN, linewidth=1.4)
        axes.set_ylim(0, 1.08 * max(values))
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(f"{unit}/s")
    return figure


def busy_by_epoch(run: Recorded) -> Figure:
    """Return the busy share of each stage by epoch."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        axes = figure.subplots()
        for k in range(run.num_stages):
            points = _finite(run.curves.get(f"stage/busy_share/{k}", ()))
            values = [100 * p.value for p in points]
            axes.plot([p.epoch for p in points], values, "o-", color=_colour(k), markersize=3, label=f"stage {k}")
        axes.set_ylim(0, 100)
        axes.set_xlabel("epoch")
        axes.set_ylabel("busy (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=axes.get_xlim()[1] >= 2))
        if run.num_stages <= MOST_IN_LEGEND:
            figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def staleness_by_update(run: Recorded) -> Figure:
    """Return the staleness of each stage by update."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        axes = figure.subplots()
        for k in range(run.num_stages):
            points = _fewer(_finite(run.curves.get(f"stage/staleness/{k}", ())))
            axes.plot([p.update + 1 for p in points], [p.value for p in points], color=_colour(k), label=f"stage {k}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("update")
        axes.set_ylabel("staleness (updates)")
        if run.num_stages <= MOST_IN_LEGEND:
            figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def _colour(stage: int) -> str:
    return COLOURS[stage % len(COLOURS)]


def shares(timeline: Timeline) -> Figure:
    """Draw each stage's time by activity, as bars that add up to 100 %."""
    spent = [timeline.shares(k) for k in range(len(timeline.stages))]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.32 * len(spent)), layout="constrained")
        axes = figure.subplots()
        left = [0.0] * len(spent)
        for share in SHARES:
            values = [100 * each[share] for each in spent]
            if any(value > 0.05 for value in values):
                axes.barh(range(len(spent)), values, left=left, color=COLOUR_OF_SHARE[share], label=share, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(spent)), [f"stage {k}" for k in range(len(spent))])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the time (%)")
        axes.grid(visible=False)
        figure.legend(loc="outside upper center", ncols=7, frameon=False, fontsize=8, handlelength=1.2)
    return figure


def measured(pipeline: Pipeline, timeline: Timeline) -> Figure:
    """Return the timeline of the recorded updates, in milliseconds."""
    spans, stale = _measured_spans(timeline), dict[tuple[int, Action], int | None]()
    for k, events in enumerate(timeline.stages):
        stale |= {(k, Action(Op(each.op), each.number)): each.staleness for each in events}
    where = "in the middle of" if timeline.is_steady else "in"
    return measured_picture(
        pipeline,
        spans,
        staleness=lambda span: stale[span.stage, span.action],
        unit="ms",
        facts=f"measured {where} epoch {timeline.epoch + 1}",
    )


def _measured_spans(timeline: Timeline) -> list[Span]:
    return [
        Span(k, Action(Op(each.op), each.number), 1000 * each.begin, 1000 * each.end)
        for k, events in enumerate(timeline.stages)
        for each in events
    ]


def scheduled(pipeline: Pipeline, timeline: Timeline | None) -> Figure:
    """Draw the schedule of the timeline's updates with its measured times.

    Messages take no time. Without a steady part it is drawn from an empty pipeline on; without a timeline in ticks.

    Raises:
        ConfigError: it is too long for a picture.
    """
    costs = costs_of(timeline) if timeline is not None else None
    if timeline is not None and timeline.is_steady and costs is not None:
        return measured_picture(
            pipeline,
            _simulated(pipeline, timeline, costs),
            staleness=lambda span: pipeline.staleness(span.stage, span.action.number) if _goes_back(span) else None,
            unit="ms",
            facts="the same updates, by the schedule",
            inches=scale(_measured_spans(timeline)),
        )
    num = 2 * (pipeline.num_stages + pipeline.micro_batches_per_update)
    num = min(num, max(MOST_MICRO_BATCHES, 2 * pipeline.num_stages + 8))
    return picture(pipeline, num_micro_batches=num, costs=costs, unit="ms")


def _simulated(pipeline: Pipeline, timeline: Timeline, costs: Costs) -> list[Span]:
    """Simulate the spans of a timeline, with the timeline's numbers."""
    M, begins = pipeline.micro_batches_per_update, pipeline.updates_to_fill
    firsts = [each.number for each in timeline.stages[0] if each.op == Op.UPDATE.value]
    num_updates = len(firsts)
    shift = firsts[0] - begins
    lists, turns = in_processes(pipeline, num_micro_batches=M * (2 * begins + num_updates + 2))
    found, made = list[Span](), [-1] * pipeline.num_stages  # the update that each stage made last
    for span in simulate(lists, costs, turns=turns):
        op, number = span.action
        if op is Op.UPDATE:
            made[span.stage] = number
        if begins <= made[span.stage] < begins + num_updates:
            by = shift if op is Op.UPDATE else shift * M
            found.append(span._replace(action=Action(op, number + by)))
    return found


def _goes_back(span: Span) -> bool:
    return span.action.op in BACKWARDS


def costs_of(timeline: Timeline) -> Costs | None:
    """Return the median times of stages in ms, or None if one is missing."""
    forward, backward, late, update = list[float](), list[float](), list[float](), list[float]()
    for k in range(len(timeline.stages)):
        ahead = timeline.median_seconds(k, Op.FORWARD)
        if ahead is None:
            ahead = timeline.median_seconds(k, Op.FORWARD_ONLY)
        back = timeline.median_seconds(k, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        if ahead is None or back is None:
            return None
        forward.append(1000 * ahead)
        backward.append(1000 * back)
        late.append(1000 * (timeline.median_seconds(k, Op.BACKWARD_WEIGHT) or 0.0))
        update.append(1000 * (timeline.median_seconds(k, Op.UPDATE) or 0.0))
    return Costs(forward=forward, backward=backward, backward_weight=late, update=update)


def units(run: Recorded) -> Figure:
    """Draw the measured time of each unit, with the cuts between stages."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        places = range(len(run.units))
        forward, backward = ([1000 * unit[name] for unit in run.units] for name in ("forward", "backward"))
        axes.bar(places, forward, color=COLOUR_OF_SHARE["forward"], label="forward")
        axes.bar(places, backward, bottom=forward, color=COLOUR_OF_SHARE["backward"], label="backward")
        top, stop = 1.15 * max(map(sum, zip(forward, backward, strict=True)), default=1.0) or 1.0, 0
        for k, size in enumerate(run.balance):
            axes.text(stop + size / 2 - 0.5, 0.97 * top, f"stage {k}", ha="center", va="top", fontsize=8)
            stop += size
            if k < len(run.balance) - 1:
                axes.axvline(stop - 0.5, color="black", linewidth=1.0, linestyle=(0, (3, 2)))
        axes.set_ylim(0, top)
        axes.set_xlim(-0.6, len(run.units) - 0.4)
        axes.set_xlabel("unit of the model")
        axes.set_ylabel("ms per micro-batch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return figure


def curves_of_runs(curves: Mapping[str, Sequence[Point]], name: str) -> Figure:
    """Draw the curves of several runs, by epoch and by seconds of training."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT + 0.2 * len(curves)), layout="constrained")
        by_epoch, by_time = figure.subplots(1, 2, sharey=True)
        for axes, x, label in ((by_epoch, _epoch, "epoch"), (by_time, _seconds, "seconds of training")):
            for number, points in enumerate(map(_finite, curves.values())):
                style = ("-", (0, (4, 1.5)), (0, (1, 1.2)))[number // len(COLOURS) % 3]
                axes.plot([x(p) for p in points], [p.value for p in points], "o", ls=style, markersize=2.5,
                          linewidth=1.4, color=COLOURS[number % len(COLOURS)])  # fmt: skip
            axes.set_xlabel(label)
        by_epoch.set_ylabel(name)
        _limit(by_epoch, [p.value for points in curves.values() for p in _finite(points)])
        figure.legend(by_epoch.lines, list(curves), loc="outside lower center", frameon=False, fontsize=8,
                      ncols=1 if max(map(len, curves)) > 40 else 2)  # fmt: skip
    return figure


def _epoch(point: Point) -> float:
    return point.epoch


def _seconds(point: Point) -> float:
    return point.seconds


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.value)]


def _fewer(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: max(1, len(points) // MOST_POINTS)]


def _draw_training(axes: Axes, points: Sequence[Point], x: Callable[[Point], float]) -> None:
    """Draw the values of updates in a pale colour, and their moving mean."""
    points = _finite(points)
    shown, width = _fewer(points), max(1, len(points) // 40)
    axes.plot([x(p) for p in shown], [p.value for p in shown], color=TRAIN, alpha=0.25, linewidth=0.8)
    sums = [0.0]
    for point in points:
        sums.append(sums[-1] + point.value)
    means = [
        p._replace(value=(sums[min(i + width, len(points))] - sums[max(i - width, 0)])
                   / (min(i + width, len(points)) - max(i - width, 0)))
        for i, p in enumerate(points)
    ]  # fmt: skip
    means = list(_fewer(means))
    axes.plot([x(p) for p in means], [p.value for p in means], color=TRAIN, linewidth=1.4, label="training")


def _limit(axes: Axes, values: Sequence[float]) -> None:
    """Limit the axis to exclude a few values far above all others."""
    if len(values) > 20:
        low, high = min(values), sorted(values)[int(0.98 * len(values))]
        if max(values) - low > 2 * (high - low) > 0:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.25 * (high - low))
