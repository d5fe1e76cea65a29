"""The content of the page about one run, section by section."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import yaml

from adl_dist.report.goal import KNOWN, LOWEST, falls
from adl_dist.report.overhead import moving_average
from adl_dist.report.page import parts
from adl_dist.report.page.parts import MISSING, VERBATIM, Curve, Part, bar, chart, colour, places, table, text
from adl_dist.report.progress import PEAKS, coded_rows, holders
from adl_dist.report.runs import DAMAGE, RESUMED, Point, Run, method_label
from adl_dist.report.tables import counted
from adl_dist.report.timeline import spans_of_schedule, spans_of_timeline, spans_with_free_links, window
from adl_dist.schedule import figures
from adl_dist.schedule.actions import BACKWARDS, Op

MOST_ENTRIES = 30  # of the logs, the newest
LONGEST_ENTRY = 4000  # characters
MOST_UNITS = 200  # in the chart of the model's units
LEAST_IDLE = 0.1  # share of the time; less is not worth a change
BINS = 60  # over which a speed is averaged
MOST_MICRO_BATCHES = 48  # of a schedule from its beginning on
FREE = 1e15  # bytes per second, of a link within a process
NO_TIMELINE = text("the timeline; set runtime.report=true (Monitoring(report=True)).", MISSING)
NO_SUMMARY = text("totals, which summary.json has at the end of a run.", MISSING)
ENDINGS = {
    "complete": ("good", "Finished"),
    "diverged": ("bad", "Diverged"),
    "stopped": ("", "Stopped"),
    "unfinished": ("bad", "Not finished: it still trains, was killed, or failed"),
}
# Of summary.json, with their names in the table of results.
FIGURES = {
    "mfu": "share of the devices' peak (MFU)",
    "train_seconds": "seconds of training",
    "seconds": "seconds from start to end",
    "epochs": "epochs",
    "updates": "updates",
    "skipped_updates": "skipped updates",
    "num_samples": "samples",
    "num_tokens": "tokens",
}
EVENTS = {  # by the name of their records
    "train/skipped_updates": "updates skipped, as their loss or gradient was not finite",
    "checkpoint/failed": "checkpoints that could not be written",
    "checkpoint/drain_changed_result": "checkpoints for which the pipeline was emptied, which changed values",
}
# Curves with charts of their own, or without.
APART = {"loss", "learning_rate", "gradient_norm", "samples_per_second", "tokens_per_second", "mfu", "skipped_updates"}


def title_of(run: Run) -> str:
    """Return the title of a run: method, K, M, model and data."""
    try:
        label = method_label(run.config["method"])
    except DAMAGE:
        label = run.folder.name
    model, data = (_named(run.config.get(key)) for key in ("model", "data"))
    K = run.num_stages and f", K={run.num_stages}"
    return f"{label}{K or ''}{model and f': {model}'}{data and f' on {data}'}"


def _named(node: object) -> str:
    """Return the target name of a configuration node, with main arguments."""
    if not isinstance(node, Mapping) or not isinstance(target := node.get("_target_"), str):
        return ""
    kept = {key: value for key, value in node.items() if key in ("name", "depth", "num_layers", "width", "num_heads")}
    arguments = ", ".join(f"{key}={value}" for key, value in kept.items() if value is not None)
    return target.rpartition(".")[2] + (f"({arguments})" if arguments else "")


def ending(run: Run) -> str:
    """Return how the run ended, a key of ENDINGS."""
    return "stopped" if "stopped" in run.summary else run.status


def head(run: Run) -> Iterator[Part]:
    """Yield a line on the end of the run, and the verdict on its stages."""
    css, said = ENDINGS[ending(run)]
    summary = run.summary
    if "stopped" in summary:
        said += f" at update {summary['stopped']['update']}, by {summary['stopped']['why']}"
    elif run.status == "diverged":
        said += f" at update {run.divergence.get('update')}, in epoch {int(run.divergence.get('epoch', 0)) + 1}"
    elif run.status == "unfinished" and (updates := [p[-1].update for p in run.curves.values() if p]):
        said += f"; the last record is of update {max(updates) + 1}"
    said += f", ended by {summary['ended_by']}" if "ended_by" in summary else ""
    said += f": {counted(summary['epochs'], 'epoch')}, {counted(summary['updates'], 'update')}" if summary else ""
    yield text(f"{said}.", css)
    if judged := verdict(run):
        yield text(judged, "verdict")


def verdict(run: Run) -> str | None:
    """Return a sentence on the idlest stage; None for one or unknown stages."""
    busy = [float(stage["busy_share"]) for stage in run.summary.get("stages", ())]
    if len(busy) < 2 or min(busy) <= 0:
        return None
    if "processes" in run.summary:
        return f"Each process ran several of the {len(busy)} stages, which took turns: its stages were busy in turn."
    stage, most = busy.index(min(busy)), busy.index(max(busy))
    idle = 1 - busy[stage]
    if idle < LEAST_IDLE:
        return f"All stages were busy for at least {min(busy):.0%} of the time."
    if run.timeline is not None and run.timeline.shares(stage)["load, send"] > idle / 2:
        why = "loading data or sending: try data.num_workers=2, or runtime.codec=int8"
    elif busy[most] - busy[stage] > idle / 2:
        is_measured = run.config.get("partition", run.config).get("balance") == "auto"
        way_out = "fewer stages" if is_measured else "partition.balance=auto"
        why = f"because the cut is uneven (stage {most} was busy for {busy[most]:.0%}): try {way_out}"
    elif run.pipeline is not None and run.pipeline.spec.flush:
        why = "as its schedule leaves it, or waiting: try method=adl, or a larger method.accumulation_steps"
    else:
        why = (
            "waiting for messages or for a free core: try larger micro-batches, fewer stages, or runtime.codec=int8 "
            "over a slow link"
        )
    return f"Stage {stage} was idle for {idle:.0%} of the time, {why}."


def facts(run: Run) -> list[tuple[str, str]]:
    """Return command, date, host and parameters, as far as they are known."""
    start, times = run.start, [entry.time for entry in run.logs]
    found = {
        "method": run.pipeline and run.pipeline.spec.summary,
        "command": start.get("command"),
        "date": times and f"{times[0]} to {times[-1]}",
        "host": start.get("host"),
        "device": start.get("device"),
        "parameters": f"{start['parameters']:,}" if "parameters" in start else "",
        "software": start.get("software"),
        "run folder": run.folder,
    }
    return [(name, str(value)) for name, value in found.items() if value]


def value_text(name: str, value: object) -> str:
    """Return a figure of summary.json as text."""
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("accuracy", "top5", "share", "mfu")):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _end_and_best(run: Run, name: str) -> str:
    """Return the last value of a metric, and its best one if that is known."""
    points = run.curves.get(curve := name.replace("_", "/", 1), ())
    end = run.summary.get(name, points[-1].value if points else None)
    mode, runtime = KNOWN.get(name) or (LOWEST if falls(name) else None), run.config.get("runtime")
    if isinstance(runtime, Mapping) and runtime.get("best_metric") == name:
        mode = runtime.get("best_mode") or mode
    known = run.finite(curve) if mode is not None else []
    best = (min if mode == LOWEST else max)(known, key=lambda point: point.value, default=None)
    shown = "" if best is None else f" (best {value_text(name, best.value)}, epoch {best.epoch:.4g})"
    return "" if end is None else f"{value_text(name, end)}{shown}"


def results(runs: Sequence[Run]) -> Iterator[Part]:
    """Yield a table of results, each run in a column, and notes about it.

    A run without a summary shows its newest records.
    """
    known = dict.fromkeys(n.replace("/", "_", 1) for run in runs for n in (*run.summary, *run.curves))
    kinds = ("validation_",) if all(run.summary for run in runs) else ("validation_", "train_")
    names = [name for name in known if name.startswith(kinds) and name not in FIGURES]
    rows: list[Sequence[object]] = [["", *(run.label for run in runs)]]
    rows += [[name.replace("_", " "), *(_end_and_best(run, name) for run in runs)] for name in names]
    speeds = [run.summary.get("tokens_per_second", run.summary.get("samples_per_second", 0.0)) for run in runs]
    if most := max(speeds):
        texts = [f"{value_text('', n)} {run.unit}/s" if n else "" for run, n in zip(runs, speeds, strict=True)]
        rows.append(["speed", *(bar(one, 100 * speed / most) for one, speed in zip(texts, speeds, strict=True))])
    for name in (name for name in FIGURES if any(name in run.summary for run in runs)):
        cells = (value_text(name, run.summary[name]) if name in run.summary else "" for run in runs)
        rows.append([FIGURES[name], *cells])
    if len(runs) > 1:
        peaks = (max((one["peak_memory_bytes"] for one in holders(run.summary)), default=0) for run in runs)
        rows.append(["memory of the largest process", *(f"{peak / 2**20:,.0f} MiB" if peak else "" for peak in peaks)])
        rows.append(["end", *(ENDINGS[ending(run)][1].partition(":")[0].lower() for run in runs)])
    yield table(rows, texts=range(1, len(rows[0])))
    if not any(run.summary for run in runs):
        yield NO_SUMMARY
    if not any(name.startswith("validation_") for name in names):
        yield text("validation; give the run validation data.", MISSING)
    yield text("Samples, times and speeds are those since a run was last started.", "quiet")


def _curves(run: Run) -> Iterator[Part]:
    found = {name.partition("/")[2] for name in run.curves if name.startswith(("train/", "validation/"))}
    names = [*(["loss"] if "loss" in found else []), *sorted(found - APART)]
    charts = [chart(n.replace("_", " "), x, _learning(run, n, key)) for n in names for key, x in parts.AXES.items()]
    for name, whole in (("learning_rate", "learning rate"), ("gradient_norm", "model")):
        drawn = _drawn(Curve(whole, "c0", places(run.finite(f"train/{name}"))))
        drawn += _of_stages(run, f"stage/{name}", run.finite)
        charts += [chart(name.replace("_", " "), "epoch", drawn, from_zero=True)] if drawn else []
    caption = "Thin line: each update; thick line: moving average. Seconds are without validation and saving."
    yield parts.charts(charts, caption, "curves; metrics.jsonl gets them while a run trains.")


def _drawn(*curves: Curve) -> list[Curve]:
    return [curve for curve in curves if curve.points]


def _learning(run: Run, name: str, x: str) -> list[Curve]:
    """Return the curves of a metric in training and validation."""
    training, validation = run.finite(f"train/{name}"), run.finite(f"validation/{name}")
    means = moving_average(training, max(1, len(training) // 40))
    curves = [Curve("training, each update", "c0 thin", places(training, x)), Curve("training", "c0", places(means, x))]
    return _drawn(*curves, Curve("validation", "c1", places(validation, x)))


def _of_stages(run: Run, name: str, read: Callable[[str], Sequence[Point]], scale: float = 1.0) -> list[Curve]:
    """Return a curve for each stage that has one."""
    stages = range(run.num_stages)
    return _drawn(*(Curve(f"stage {k}", colour(k), places(read(f"{name}/{k}"), scale=scale)) for k in stages))


def _throughput(run: Run) -> Iterator[Part]:
    points = run.finite("train/loss")
    points = points[:: max(1, -(-len(points) // BINS))]
    unit, total = run.unit, run.summary.get("num_samples")
    scale = run.summary["num_tokens"] / total if total and "num_tokens" in run.summary else 1.0
    pairs = [(a, b) for a, b in pairwise(points) if b.seconds > a.seconds]
    speeds = [(b.seconds, scale * (b.samples - a.samples) / (b.seconds - a.seconds)) for a, b in pairs]
    drawn = [chart(f"{unit} per second", "seconds of training", [Curve(unit, "c0", speeds)], from_zero=True)]
    caption = f"Each point: mean over the time since the one before it. At most {BINS} points."
    yield parts.charts(drawn if speeds else [], caption, "the speed; metrics.jsonl has no records of updates.")


def stage_table(runs: Sequence[Run]) -> Iterator[Part]:
    """Yield a table of the stages' busy shares, delays and staleness."""
    rows: list[Sequence[object]] = [["", "stage", "busy", "delay", "mean staleness", "expected", "largest"]]
    for run in runs:
        planned = {f.stage: (f.delay, f"{f.staleness_mean:.3f}") for f in figures(run.pipeline)} if run.pipeline else {}
        for stage in run.summary.get("stages", ()):
            delay, expected = planned.get(stage["stage"], ("", ""))
            busy = bar(f"{stage['busy_share']:.0%}", 100 * stage["busy_share"])
            stale = [delay, f"{stage['staleness_mean']:.3f}", expected, stage["staleness_max"]]
            rows.append([run.label, stage["stage"], busy, *stale])
    if len(rows) == 1:
        yield NO_SUMMARY
        return
    yield table(rows, texts=(2,))
    note = (
        "Busy: the share of training time in forward, backward and update. Delay: in micro-batches. Staleness: "
        "updates of the stage between the forward of a micro-batch and its own update; expected: that of the "
        "schedule, once the pipeline is full."
    )
    yield text(note, "quiet")


def _stages(run: Run) -> Iterator[Part]:
    yield from stage_table([run])
    charts = list[Part]()
    if busy_shares := _of_stages(run, "stage/busy_share", run.finite, scale=100):
        charts.append(chart("busy (%)", "epoch", busy_shares, from_zero=True, top=100))
    if staleness := _of_stages(run, "stage/staleness", lambda name: _over_epoch(run.finite(name))):
        charts.append(chart("mean staleness (updates)", "epoch", staleness, from_zero=True))
    if charts:
        note = "Staleness: mean since the record before (runtime.stage_records_every), averaged over an epoch."
        yield parts.charts(charts, note)
    if run.timeline is not None:
        yield parts.shares(run.timeline, "The time of each stage during the timeline below.")


def _over_epoch(points: Sequence[Point]) -> list[Point]:
    """Return the moving average of ``points`` over an epoch.

    It evens out the ends of an epoch, where updates are less stale.
    """
    return moving_average(points, max(1, len(points) // max(1, round(points[-1].epoch)))) if points else []


def _timeline(run: Run) -> Iterator[Part]:
    pipeline, timeline = run.pipeline, run.timeline
    if pipeline is None:
        yield text("the method, without which no schedule can be drawn (config.yaml).", MISSING)
        return
    K, M = pipeline.num_stages, pipeline.micro_batches_per_update
    if timeline is None:
        num = min(2 * (K + M), max(MOST_MICRO_BATCHES, 2 * K + 8))
        spans = spans_of_schedule(pipeline, num)
        length = max(span.end for span in spans)
        planned = parts.lanes("The schedule", spans, length, lambda span: None)
        yield NO_TIMELINE
        yield parts.timelines([planned], K, length, "ticks", "From an empty pipeline on. A message takes a tick.")
        return
    stale = {(k, each.op, each.number): each.staleness for k, events in enumerate(timeline.stages) for each in events}
    spans, free = window(spans_of_timeline(timeline), K), window(spans_with_free_links(pipeline, timeline), K)
    length = max(span.end for span in (*spans, *free))
    measured = f"Measured {'in the middle of' if timeline.is_steady else 'in'} epoch {timeline.epoch + 1}"
    drawn = [parts.lanes(measured, spans, length, lambda s: stale[s.stage, s.action.op.value, s.action.number])]
    if free:
        expected = {s: pipeline.staleness(s.stage, s.action.number) for s in free if s.action.op in BACKWARDS}
        name = "The same updates by the schedule, if messages took no time"
        drawn.append(parts.lanes(name, free, length, expected.get))
    notes = "Numbers: micro-batch, and U for an update. For all events of a run set runtime.trace=true."
    if not timeline.is_steady:
        notes += " The run was too short for a part in which all stages are at work all the time."
    if timeline.device == "cuda":
        notes += " On a GPU these are the times in which the host launched the work, not those of the device."
    yield parts.timelines(drawn, K, length, "milliseconds", notes)


def _memory(run: Run) -> Iterator[Part]:
    held, is_alone = holders(run.summary), "processes" not in run.summary
    if not held:
        yield NO_SUMMARY
        return
    names = {**PEAKS, "peak_tensor_bytes": "of it tensors"}
    columns = [name for name in names if any(name in one for one in held)]
    largest = max((one.get(name, 0) for one in held for name in columns), default=1)
    rows: list[Sequence[object]] = [["stage" if is_alone else "process", *(names[name] for name in columns)]]
    for one in held:
        name = one["stage"] if is_alone else f"{one['rank']} (stages {', '.join(map(str, one['stages']))})"
        sizes = [one.get(column) for column in columns]
        rows.append([name, *("" if n is None else bar(f"{n / 2**20:,.1f} MiB", 100 * n / largest) for n in sizes)])
    yield table(rows, texts=range(1, 1 + len(columns)))
    if "peak_tensor_bytes" not in columns:
        yield text("the bytes of tensors alone; set runtime.profile_memory=true.", MISSING)


def _cut(run: Run) -> Iterator[Part]:
    stages = run.start.get("stages", ())
    rows: list[Sequence[object]] = [["stage", "units", "from", "to", "forward", "backward", "update"]]
    kinds = (Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), (Op.UPDATE,)
    for k, units in enumerate(stages):
        is_timed = run.timeline is not None and k < len(run.timeline.stages)
        times = [run.timeline.median_seconds(k, *ops) if is_timed else None for ops in kinds]
        rows.append([k, *units, *("" if seconds is None else f"{1000 * seconds:.2f} ms" for seconds in times)])
    if stages:
        yield table(rows, texts=(2, 3))
        yield text("Times: medians of the timeline, per micro-batch; update: per update.", "quiet")
    if not run.units:
        yield text("the cost of each unit; set partition.balance=auto to measure it and cut by it.", MISSING)
    elif len(run.units) <= MOST_UNITS:
        yield _unit_bars(run)
    rows = [["cut after", "stages", "activation", "gradient"]]
    for k, stop in enumerate(accumulate(size for size, _, _ in stages[:-1]) if run.units else ()):
        unit = run.units[stop - 1]
        crossing = [f"{int(unit.get(name, 0)) / 1024:,.1f} KiB" for name in ("act_bytes", "grad_bytes")]
        rows.append([unit["name"], f"{k} to {k + 1}", *crossing])
    if len(rows) > 1:
        yield table(rows)
        yield text("Bytes of one micro-batch that cross each cut.", "quiet")


def _unit_bars(run: Run) -> Part:
    """Return bars of the units' measured times, in order, stage by stage."""
    kinds = "forward", "backward"
    most = max((unit["forward"] + unit["backward"] for unit in run.units), default=0.0) or 1.0
    stages = [f"stage {k}: " for k, units in enumerate(run.start.get("stages", ())) for _ in range(units[0])]
    stages += [""] * len(run.units)
    bars = [
        (f"{where}{unit['name']}", [(n, 100 * unit[n] / most, f"{n} {1000 * unit[n]:.3g} ms") for n in kinds])
        for where, unit in zip(stages, run.units, strict=False)
    ]
    caption = f"Measured time of each unit of the model; full width: {1000 * most:.3g} ms."
    return parts.bars(bars, [*zip(kinds, kinds, strict=True)], caption)


def _links(run: Run) -> Iterator[Part]:
    rows: list[Sequence[object]] = [["measured of", "link", "bandwidth", "latency"]]
    for measured, links in run.links.items():
        for k, (rate, seconds) in enumerate(links):
            speed = "within a process" if rate >= FREE else f"{8 * rate / 1e6:,.0f} Mbit/s"
            rows.append([measured, f"{k} to {k + 1}", speed, "" if rate >= FREE else f"{1000 * seconds:.3f} ms"])
    if len(rows) > 1:
        yield table(rows, texts=(1,))
    given = run.config.get("partition", {}).get("links")
    if given not in (None, "auto"):
        yield text(f"Described by partition.links: {given}.")
    elif len(rows) == 1:
        yield text("link speeds; set partition.balance=auto partition.links=auto to measure them.", MISSING)
    if coded := coded_rows(run.summary):
        yield table(coded, texts=(1, 2))


def _events(run: Run) -> Iterator[Part]:
    for name, kind in EVENTS.items():
        if number := len(run.curves.get(name, ())):
            yield text(f"{number} {kind}.", "bad")
    if not run.logs:
        yield text("logs; the processes of a run with a run_dir write them.", MISSING)
        return
    resumed = [entry for entry in run.logs if entry.text.startswith(RESUMED)]
    serious = [entry for entry in run.logs if entry.level in ("WARNING", "ERROR", "CRITICAL")]
    if resumed:
        times = "once" if len(resumed) == 1 else f"{len(resumed)} times"
        yield text(f"The run was started again from a checkpoint {times}.")
    if not serious:
        yield text("No warnings and no errors in the logs: no stall, no process that was lost.", "good")
    entries = sorted([*serious, *resumed], key=lambda entry: entry.time)
    if len(entries) > MOST_ENTRIES:
        yield text(f"The newest {MOST_ENTRIES} of {len(entries)} entries of the logs:", "quiet")
    for entry in entries[-MOST_ENTRIES:]:
        yield text(f"{entry.time} {entry.rank} {entry.level.lower()}: {entry.text[:LONGEST_ENTRY]}", VERBATIM)


def _configuration(run: Run) -> Iterator[Part]:
    if run.config:
        yield text(yaml.safe_dump(dict(run.config), sort_keys=False), VERBATIM)
    else:
        yield text("the settings, which config.yaml has.", MISSING)


SECTIONS: dict[str, Callable[[Run], Iterator[Part]]] = {
    "Results": lambda run: results([run]),
    "Learning curves": _curves,
    "Throughput": _throughput,
    "Stages": _stages,
    "Timeline": _timeline,
    "Memory": _memory,
    "Cut": _cut,
    "Links": _links,
    "Events": _events,
    "Configuration": _configuration,
}
