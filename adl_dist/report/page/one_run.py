"""The page about one run: summary, end, and all records part by part."""

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from adl_dist import __version__
from adl_dist.errors import AdlError
from adl_dist.report.goal import KNOWN, LOWEST, falls
from adl_dist.report.logs import RESUMED
from adl_dist.report.page import drawings
from adl_dist.report.page.markup import (
    Html,
    Section,
    bar,
    escaped,
    figure,
    heading,
    missing,
    page,
    paragraph,
    scrolled,
    table,
    verbatim,
)
from adl_dist.report.page.recorded import Recorded, read
from adl_dist.report.progress import PEAKS, holders
from adl_dist.report.runs import method_label
from adl_dist.report.tables import counted
from adl_dist.schedule import figures
from adl_dist.schedule.actions import Op
from adl_dist.settings import renamed

MOST_ENTRIES = 30  # of the logs, the newest
LONGEST_ENTRY = 4000  # characters
SHOWN_MODULES = 4  # first and last ones of a stage
MOST_UNITS = 200  # in the figure of the model's units
NO_TIMELINE = "set runtime.report=true (Monitoring(report=True)) to record a few updates of each stage."
ENDINGS = {
    "complete": ("good", "It came to its end"),
    "diverged": ("bad", "It diverged"),
    "stopped": ("", "It was stopped"),
    "unfinished": ("bad", "It has not come to its end: it still trains, was killed, or failed"),
}
# What may be wrong with files of another version, or that someone has edited.
DAMAGE = (AdlError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)


def page_of_run(folder: Path) -> str:
    """Return the page about the run in ``folder``.

    Raises:
        ConfigError: there is no run.
    """
    run = read(folder)
    parts: dict[str, Callable[[Recorded], Sequence[Html]]] = {
        "Results": _results,
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
    sections = [Section(name, shown(part, run)) for name, part in parts.items()]
    return page(title_of(run), [*shown(_head, run)], sections, footer())


def shown(part: Callable[[Recorded], Sequence[Html]], run: Recorded) -> Sequence[Html]:
    """Return a part of the page about ``run``, or a line with its error."""
    try:
        return part(run)
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [paragraph(f"Cannot be shown: a file of the run is damaged or of another version ({reason}).", "bad")]


def footer() -> str:
    """Return the footer with the versions of the software."""
    versions = [f"adl_dist {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "matplotlib"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Written by adl-dist report with {', '.join(versions)}. The page needs no other file and no network."


def title_of(run: Recorded) -> str:
    """Return the title of a run: method, K, M, model and data."""
    chosen = run.config.get("method")
    try:
        label = method_label(chosen) if isinstance(chosen, Mapping) else run.folder.name
    except DAMAGE:
        label = str(chosen.get("name", run.folder.name)) if isinstance(chosen, Mapping) else run.folder.name
    K = f", K={run.num_stages}" if run.num_stages else ""
    model, data = (_named(run.config.get(key)) for key in ("model", "data"))
    return f"{label}{K}" + (f": {model}" if model else "") + (f" on {data}" if data else "")


def _named(node: object) -> str:
    """Return the target name of a configuration node, with main arguments."""
    if not isinstance(node, Mapping) or not isinstance(target := node.get("_target_"), str):
        return ""
    kept = {key: value for key, value in node.items() if key in ("name", "depth", "num_layers", "width", "num_heads")}
    arguments = ", ".join(f"{key}={value}" for key, value in kept.items() if value is not None)
    return target.rpartition(".")[2] + (f"({arguments})" if arguments else "")


def _head(run: Recorded) -> Sequence[Html]:
    kind, text = ENDINGS[run.status]
    summary = run.summary
    if run.status == "stopped":
        where = summary["stopped"]
        text += f" at update {where['update']}, by {where['why']}"
    if run.status == "diverged" and run.divergence:
        text += f" at update {run.divergence.get('update')}, in epoch {int(run.divergence.get('epoch', 0)) + 1}"
    if run.status == "unfinished" and (updates := [p[-1].update for p in run.curves.values() if p]):
        text += f"; the last record is of update {max(updates) + 1}"
    if "ended_by" in summary:
        text += f", ended by {summary['ended_by']}"
    if summary:
        text += f": {counted(summary['epochs'], 'epoch')}, {counted(summary['updates'], 'update')}"
    lines = [paragraph(text + ".", kind), paragraph(Html(f"Run folder <code>{escaped(run.folder)}</code>"), "quiet")]
    if run.pipeline is not None:
        lines.insert(1, paragraph(f"{run.pipeline.spec.summary}", "quiet"))
    return [*lines, *(paragraph(problem, "bad") for problem in run.problems)]


def value_text(name: str, value: object) -> str:
    """Return a figure of summary.json as text."""
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith(("accuracy", "top5", "share", "mfu")):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _best_mode(run: Recorded, name: str) -> str | None:
    """Return whether a metric is best at its max or min, or None."""
    runtime = run.config.get("runtime")
    if isinstance(runtime, Mapping) and runtime.get("best_metric") == name:
        mode = renamed({f"runtime.{key}": value for key, value in runtime.items()}).get("runtime.best_mode")
        if mode is not None:
            return str(mode)
    return KNOWN.get(name) or (LOWEST if falls(name) else None)


def _best(values: Sequence[float], best_mode: str | None) -> float | None:
    if best_mode is None:
        return None
    return min(values, default=None) if best_mode == LOWEST else max(values, default=None)


def _results(run: Recorded) -> Sequence[Html]:
    summary = run.summary
    if not summary:
        if not run.curves:
            return [missing("nothing was trained yet.")]
        rows: list[Sequence[object]] = [["newest record", "value", "update"]]
        rows += [
            [name, value_text(name, points[-1].value), points[-1].update + 1]
            for name, points in run.curves.items()
            if name.startswith(("train/", "validation/"))
        ]
        return [missing("the run has no summary.json, which is written at its end."), table(rows)]
    rows = [["figure", "value", "best"]]
    for name, value in summary.items():
        if name.startswith("validation_"):
            curve = [p.value for p in run.curves.get(name.replace("_", "/", 1), ()) if p.value == p.value]
            best = _best(curve, _best_mode(run, name))
            rows.append(
                [name.replace("_", " "), value_text(name, value), "" if best is None else value_text(name, best)]
            )
    unit = run.unit
    speed = summary.get("tokens_per_second", summary.get("samples_per_second"))
    rows += [[f"{unit} per second", value_text("", speed), ""]] if speed is not None else []
    for name, label in (
        ("mfu", "share of the devices' peak (MFU)"),
        ("train_seconds", "seconds of training"),
        ("seconds", "seconds in all"),
        ("epochs", "epochs"),
        ("updates", "updates"),
        ("skipped_updates", "skipped updates"),
        ("num_samples", "samples"),
        ("num_tokens", "tokens"),
    ):
        if name in summary:
            rows.append([label, value_text(name, summary[name]), ""])
    parts = [table(rows)]
    if not any(name.startswith("validation_") for name in summary):
        parts.append(missing("validation figures; give the run validation data."))
    if run.status == "unfinished":
        parts.append(paragraph("These figures are of an earlier end of this run.", "quiet"))
    return [*parts, paragraph("Times and speeds are those since the run was started last.", "quiet")]


def _curves(run: Recorded) -> Sequence[Html]:
    found = {name.partition("/")[2] for name in run.curves if name.startswith(("train/", "validation/"))}
    left_out = {"learning_rate", "samples_per_second", "tokens_per_second", "mfu", "skipped_updates"}
    names = ["loss", *sorted(found - left_out - {"loss"})] if "loss" in found else sorted(found - left_out)
    if not names:
        return [missing("metrics.jsonl has no records; they are written while a run trains.")]
    drawn = drawings.learning_curves(run, names)
    text = "Training: each update pale, the mean of its neighbours full. Left by epoch, right by seconds of training"
    return [figure(drawn, f"{text}, without validation and saving.", name="curves")]


def _throughput(run: Recorded) -> Sequence[Html]:
    if not run.speeds:
        return [missing("metrics.jsonl has no records of updates.")]
    note = f"{run.unit} per second over the time of training, from the end of one update to the end of the next."
    return [figure(drawings.throughput(run.speeds, run.unit), note.capitalize(), name="speed")]


def _stages(run: Recorded) -> Sequence[Html]:
    stages: Sequence[Mapping[str, Any]] = run.summary.get("stages", ())
    parts = list[Html]()
    if stages:
        planned = {f.stage: f for f in figures(run.pipeline)} if run.pipeline is not None else {}
        rows: list[Sequence[object]] = [["stage", "busy", "mean staleness", "by the schedule", "most", "delay"]]
        for stage in stages:
            plan = planned.get(stage["stage"])
            by_schedule = ["", ""] if plan is None else [f"{plan.staleness_mean:.3f}", plan.delay]
            busy = bar(f"{stage['busy_share']:.0%}", stage["busy_share"])
            rows.append([stage["stage"], busy, f"{stage['staleness_mean']:.3f}", by_schedule[0],
                         stage["staleness_max"], by_schedule[1]])  # fmt: skip
        parts.append(table(rows, text_columns=(1,)))
        note = (
            "Busy: the share of training time in forward, backward and update. Staleness: updates of the stage between "
            "the forward of a micro-batch and its own update; by the schedule: once the pipeline is full. Delay: in "
            "micro-batches."
        )
        parts.append(paragraph(note, "quiet"))
    else:
        parts.append(missing("the run has no summary.json, which is written at its end."))
    if len(run.curves.get("stage/busy_share/0", ())) > 1:
        parts.append(figure(drawings.busy_by_epoch(run), "Busy share of each stage by epoch.", name="busy"))
    if run.curves.get("stage/staleness/0"):
        text = "Mean staleness of each stage, of the updates of which it is recorded (runtime.stage_records_every)."
        parts.append(figure(drawings.staleness_by_update(run), text, name="staleness"))
    if run.timeline is not None:
        drawn = drawings.shares(run.timeline)
        parts.append(figure(drawn, "What each stage did in the updates of the timeline.", name="shares"))
    return parts


def _timeline(run: Recorded) -> Sequence[Html]:
    parts = list[Html]()
    if run.timeline is None:
        parts.append(missing(NO_TIMELINE))
    if run.pipeline is None:
        return [*parts, missing("the method, without which no schedule can be drawn (config.yaml).")]
    measured = [heading("Measured"), *shown(_measured, run)] if run.timeline is not None else []
    return [*parts, scrolled([*measured, heading("The schedule"), *shown(_scheduled, run)])]


def _measured(run: Recorded) -> Sequence[Html]:
    assert run.timeline is not None
    assert run.pipeline is not None
    notes = ["Grey: the stage waits."]
    if not run.timeline.is_steady:
        notes.append("The run was too short for a part in which all stages are at work all the time.")
    if run.timeline.device == "cuda":
        notes.append("On a GPU these are the times in which the host launched the work, not those of the device.")
    notes.append("For all events of a run set runtime.trace=true.")
    drawn = drawings.measured(run.pipeline, run.timeline)
    return [figure(drawn, " ".join(notes), name="measured", is_wide=True)]


def _scheduled(run: Recorded) -> Sequence[Html]:
    assert run.pipeline is not None
    drawn = drawings.scheduled(run.pipeline, run.timeline)
    text = "From an empty pipeline on. A message takes a tick."
    if run.timeline is not None:
        text = "Each stage takes the median of its measured times, and messages take no time."
    return [figure(drawn, text, name="schedule", is_wide=True)]


def _memory(run: Recorded) -> Sequence[Html]:
    held = holders(run.summary)
    if not held:
        return [missing("the run has no summary.json, which is written at its end.")]
    names = {**PEAKS, "peak_tensor_bytes": "of it tensors"}
    columns = [name for name in names if any(name in one for one in held)]
    largest = max((one.get(name, 0) for one in held for name in columns), default=1)
    is_alone = "processes" not in run.summary
    rows: list[Sequence[object]] = [["stage" if is_alone else "process", *(names[name] for name in columns)]]
    for one in held:
        cells = [bar(f"{one[name] / 2**20:,.1f} MiB", one[name] / largest) if name in one else "" for name in columns]
        rows.append([one["stage"] if is_alone else f"{one['rank']} (stages {_listed(one['stages'])})", *cells])
    parts = [table(rows, text_columns=range(1, 1 + len(columns)))]
    if "peak_tensor_bytes" not in columns:
        parts.append(missing("the bytes of tensors alone; set runtime.profile_memory=true."))
    return parts


def _listed(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers))


def _cut(run: Recorded) -> Sequence[Html]:
    parts = list[Html]()
    K = run.num_stages
    if run.balance or run.pieces or run.timeline is not None:
        head = ["stage", "units", "which", "weights", "optimizer"]
        rows: list[Sequence[object]] = [[*head, "forward", "backward", "update"]]
        for k in range(K):
            units = run.balance[k] if k < len(run.balance) else ""
            piece = run.pieces[k] if len(run.pieces) == K else None
            held = [_units(run, k), "", ""]
            if piece is not None:
                held = [
                    _units(run, k) or _modules(piece.tensors),
                    _mebibytes(piece.weight_bytes),
                    _mebibytes(piece.optimizer_bytes),
                ]
            rows.append([k, units, *held, *_times(run, k)])
        parts.append(table(rows, text_columns=(2,)))
        note = "Weights and optimizer: bytes in the newest checkpoint. Times: medians of the timeline, per micro-batch"
        parts.append(paragraph(f"{note}; update: per update.", "quiet"))
    else:
        parts.append(missing("the run has no checkpoint yet, which says where the model is cut."))
    if not run.units:
        return [*parts, missing("the cost of each unit; set partition.balance=auto to measure it and cut by it.")]
    if len(run.units) <= MOST_UNITS:
        text = "Measured costs of the model's units, by which it was cut; dashed: the cuts."
        parts.append(figure(drawings.units(run), text, name="units"))
    rows, stop = [["cut after", "stages", "activation", "gradient"]], 0
    for k, size in enumerate(run.balance[:-1]):
        stop += size
        unit = run.units[stop - 1]
        crossing = [f"{int(unit.get(name, 0)) / 1024:,.1f} KiB" for name in ("act_bytes", "grad_bytes")]
        rows.append([unit["name"], f"{k} to {k + 1}", *crossing])
    if len(rows) > 1:
        parts += [table(rows), paragraph("Bytes of one micro-batch that cross each cut.", "quiet")]
    return parts


def _units(run: Recorded, stage: int) -> str:
    """Return the names of a stage's first and last unit, if known."""
    if sum(run.balance) != len(run.units) or not run.units:
        return ""
    start = sum(run.balance[:stage])
    first, last = run.units[start]["name"], run.units[start + run.balance[stage] - 1]["name"]
    return str(first) if first == last else f"{first} to {last}"


def _modules(tensors: Sequence[str]) -> str:
    """Return the modules of ``tensors``: of a list each, otherwise outermost."""
    names = dict[str, None]()
    for tensor in tensors:
        parts = tensor.split(".")[:-1] or [tensor]
        number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
        names[".".join(parts[: number + 1])] = None
    found = sorted(names, key=_in_order)
    return ", ".join(
        found if len(found) <= 2 * SHOWN_MODULES else [*found[:SHOWN_MODULES], "...", *found[-SHOWN_MODULES:]]
    )


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer10 behind layer9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _times(run: Recorded, stage: int) -> list[str]:
    if run.timeline is None or stage >= len(run.timeline.stages):
        return ["", "", ""]
    kinds = (Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), (Op.UPDATE,)
    found = (run.timeline.median_seconds(stage, *ops) for ops in kinds)
    return ["" if seconds is None else f"{1000 * seconds:.2f} ms" for seconds in found]


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"


def _links(run: Recorded) -> Sequence[Html]:
    rows: list[Sequence[object]] = [["measured of", "link", "bandwidth", "latency"]]
    for what, links in run.links.items():
        for k, (rate, seconds) in enumerate(links):
            is_free = rate >= 1e15
            speed = "within a process" if is_free else f"{8 * rate / 1e6:,.0f} Mbit/s"
            rows.append([what, f"{k} to {k + 1}", speed, "" if is_free else f"{1000 * seconds:.3f} ms"])
    parts = [table(rows, text_columns=(1,))] if len(rows) > 1 else []
    given = run.config.get("partition", {}).get("links")
    if given not in (None, "auto"):
        parts.append(paragraph(f"Described by partition.links: {given}."))
    if not parts:
        parts.append(missing("link speeds; set partition.balance=auto partition.links=auto to measure them."))
    coded = [(stage["stage"], edge) for stage in run.summary.get("stages", ()) for edge in stage.get("coded", ())]
    if coded:
        rows = [["link", "what", "codec", "sent", "of its bytes", "relative error"]]
        for stage, edge in coded:
            to, error = stage + (1 if edge["what"] == "act" else -1), edge.get("error")
            share = edge["bytes"] / max(1, edge["plain_bytes"])
            what = "activations" if edge["what"] == "act" else "gradients"
            rows.append([f"{stage} to {to}", what, edge["codec"], f"{edge['bytes'] / 1e6:,.1f} MB", f"{share:.1%}",
                         "" if error is None else f"{error:.3%}"])  # fmt: skip
        parts.append(table(rows, text_columns=(1, 2)))
    return parts


def _events(run: Recorded) -> Sequence[Html]:
    parts = list[Html]()
    if skipped := run.summary.get("skipped_updates") or len(run.curves.get("train/skipped_updates", ())):
        parts.append(paragraph(f"{skipped} updates were skipped: their loss or gradient was not finite.", "bad"))
    if run.divergence:
        parts.append(paragraph(f"A loss or gradient was not finite at update {run.divergence.get('update')}.", "bad"))
    if failed := run.curves.get("checkpoint/failed"):
        parts.append(paragraph(f"{len(failed)} checkpoints could not be written.", "bad"))
    if drained := run.curves.get("checkpoint/drain_changed_result"):
        text = "checkpoints were asked for in mid-epoch, for which the pipeline was emptied; this changed values"
        parts.append(paragraph(f"{len(drained)} {text}."))
    if not run.logs:
        return [*parts, missing("the run has no logs/; the processes of a run with a run_dir write them.")]
    resumed = [entry for entry in run.logs if entry.text.startswith(RESUMED)]
    serious = [entry for entry in run.logs if entry.level in ("WARNING", "ERROR", "CRITICAL")]
    if resumed:
        times = "once" if len(resumed) == 1 else f"{len(resumed)} times"
        parts.append(paragraph(f"The run was started again from a checkpoint {times}."))
    if not serious:
        parts.append(paragraph("No warnings and no errors in the logs: no stall, no process that was lost.", "good"))
    entries = sorted([*serious, *resumed], key=lambda entry: entry.time)
    if len(entries) > MOST_ENTRIES:
        parts.append(paragraph(f"The newest {MOST_ENTRIES} of {len(entries)} entries of the logs:", "quiet"))
    for entry in entries[-MOST_ENTRIES:]:
        parts.append(verbatim(f"{entry.time} {entry.rank} {entry.level.lower()}: {entry.text[:LONGEST_ENTRY]}"))
    return parts


def _configuration(run: Recorded) -> Sequence[Html]:
    if not run.config:
        return [missing("the run has no config.yaml.")]
    return [verbatim(yaml.safe_dump(dict(run.config), sort_keys=False))]
