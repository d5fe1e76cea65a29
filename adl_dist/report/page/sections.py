"""The sections of a run's page: each returns HTML from what the run folder holds, or says what it does not hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adl_dist.report.page import figures, markup
from adl_dist.report.page.records import Record, newest_manifest, notes_in_logs, read_records, steady_updates
from adl_dist.report.picture import picture
from adl_dist.report.progress import PEAKS, holders
from adl_dist.report.runs import Run, read_json
from adl_dist.schedule import Method, Pipeline, method

MIB = 2**20
MOST_NOTES = 40
NO_SUMMARY = "Not recorded: the run has not ended by itself, so it has no summary.json."


@dataclass(frozen=True)
class Folder:
    """A run, its folder, and the records in it."""

    run: Run
    path: Path
    summary: Mapping[str, Any]  # also of a run that is not complete
    records: Mapping[str, Sequence[Record]]

    @classmethod
    def of(cls, run: Run) -> "Folder":
        """Read the folder of ``run``."""
        return cls(run, run.folder, read_json(run.folder / "summary.json"), read_records(run.folder))


def result(folder: Folder) -> str:
    """Show how the run ended."""
    rows = [["figure", "value"], ["ended", folder.run.status]]
    if folder.run.divergence:
        rows += [[f"diverged: {key}", str(value)] for key, value in folder.run.divergence.items()]
    plain = {key: value for key, value in folder.summary.items() if isinstance(value, (int, float, str))}
    rows += [[key.replace("_", " "), _number(key, value)] for key, value in plain.items()]
    return markup.table(rows) + ("" if folder.summary else markup.missing(NO_SUMMARY))


def learning(folder: Folder) -> str:
    """Show the learning curves."""
    figure = figures.draw_learning(folder.records)
    return markup.inline(figure) if figure else markup.missing("Not recorded: metrics.jsonl has no loss yet.")


def speed(folder: Folder) -> str:
    """Show the throughput."""
    figure = figures.draw_speed(folder.records)
    return markup.inline(figure) if figure else markup.missing("Not recorded: no epoch has ended.")


def stages(folder: Folder) -> str:
    """Show how busy and how stale each stage was."""
    of_stages = folder.summary.get("stages", ())
    if not of_stages:
        return markup.missing(NO_SUMMARY)
    rows: list[list[object]] = [["stage", "busy", "staleness, mean", "staleness, most"]]
    for s in of_stages:
        rows.append([s["stage"], f"{s['busy_share']:.0%}", f"{s['staleness_mean']:.3f}", s["staleness_max"]])
    about = "Staleness: updates of the stage between a micro-batch's forward and its backward."
    more = "" if "shares" in of_stages[0] else markup.missing("For the other shares of time: runtime.trace=true.")
    return markup.inline(figures.draw_shares(of_stages)) + markup.table(rows) + markup.text(about) + more


def timeline(folder: Folder, trace: str) -> str:
    """Show some steady updates as they were measured; ``trace``: the name of the trace's file."""
    found = steady_updates(folder.path / trace)
    if found is None:
        return markup.missing(f"Not recorded: {trace} is written by runs with runtime.trace=true.")
    last = found.first_update + found.num_updates - 1
    about = f"Updates {found.first_update} to {last} of stage 0, and what the other stages did meanwhile."
    return markup.text(about) + markup.inline(figures.draw_timeline(found), scrolls=True)


def schedule(folder: Folder) -> str:
    """Show the schedule that the run followed."""
    K, M = folder.run.num_stages, folder.run.accumulation_steps
    pipeline = Pipeline(_method_of(folder), K)
    drawn = picture(pipeline, num_micro_batches=min(2 * K + 2 * M, 40))
    return markup.text("The same method from its start, by ticks.") + markup.inline(drawn, scrolls=True)


def _method_of(folder: Folder) -> Method:
    chosen = dict(folder.run.method)
    if chosen.get("delay") == "auto":
        chosen["delay"] = yaml.safe_load((folder.path / "delays.json").read_text())
    known = {"name", "accumulation_steps", *method(chosen["name"]).settings}
    return method(**{key: value for key, value in chosen.items() if key in known})


def memory(folder: Folder) -> str:
    """Show the peaks of memory."""
    holding = holders(folder.summary)
    held = [
        (f"{'process' if 'rank' in one else 'stage'} {one.get('rank', one.get('stage'))}, {words}", one[key] / MIB)
        for key, words in PEAKS.items()
        for one in holding
        if key in one
    ]
    held += [
        (f"stage {s['stage']}, tensors", s["peak_tensor_bytes"] / MIB)
        for s in folder.summary.get("stages", ())
        if "peak_tensor_bytes" in s
    ]
    return markup.inline(figures.draw_memory(held)) if held else markup.missing(NO_SUMMARY)


def cut(folder: Folder) -> str:
    """Show where the model is cut, and what each stage costs as far as that was measured."""
    manifest = newest_manifest(folder.path)
    found = manifest.get("identity", {}).get("cut", {})
    balance = found.get("balance")
    if not balance:
        return markup.missing("Not recorded: there is no checkpoint yet.")
    units = read_json(folder.path / "profile.json").get("units", [])
    costs = units if len(units) == sum(balance) else []
    sizes = [size["bytes"] for name, size in sorted(manifest["files"].items()) if name.startswith("model-")]
    head = ["stage", f"units ({found.get('granularity', 'of the cut')})"]
    rows: list[list[object]] = [[*head, *(["begins at", "forward", "backward", "update"] if costs else []), "weights"]]
    first = 0
    for k, number in enumerate(balance):
        own = costs[first : first + number]
        times = [f"{1e3 * sum(unit[key] for unit in own):.2f} ms" for key in ("forward", "backward", "update")]
        size = f"{sizes[k] / MIB:.2f} MiB" if len(sizes) == len(balance) else "."
        rows.append([k, number, *([own[0]["name"], *times] if costs else []), size])
        first += number
    about = "Times of one micro-batch, as measured before the first update." if costs else ""
    more = markup.text(about) if costs else markup.missing("Costs: measured by runs with partition.balance=auto.")
    return markup.table(rows) + more


def links(folder: Folder) -> str:
    """Show the speed of the links, and what coding has spared."""
    parts = []
    for name, edges in read_json(folder.path / "links.json").items():
        rows = [["link", "rate", "latency"]]
        rows += [
            [f"{k} - {k + 1}", f"{rate / 1e6:,.1f} MB/s", f"{1e3 * latency:.3f} ms"]
            for k, (rate, latency) in enumerate(edges)
        ]
        parts += [markup.text(name), markup.table(rows)]
    coded: list[list[object]] = [["coded edge", "what", "codec", "relative error", "MB sent", "of its bytes"]]
    for stage in folder.summary.get("stages", ()):
        for edge in stage.get("coded", ()):
            to = stage["stage"] + (1 if edge["what"] == "act" else -1)
            error = "." if edge.get("error") is None else f"{edge['error']:.3%}"
            share = edge["bytes"] / max(1, edge["plain_bytes"])
            sent = f"{edge['bytes'] / 1e6:,.1f}"
            coded.append([f"{stage['stage']} to {to}", edge["what"], edge["codec"], error, sent, f"{share:.1%}"])
    parts += [markup.table(coded)] if len(coded) > 1 else []
    return "".join(parts) or markup.missing("Not recorded: links are measured by runs with partition.links=auto.")


def notes(folder: Folder) -> str:
    """Show what the watchdog and others have warned of."""
    found = notes_in_logs(folder.path)
    if not found:
        return markup.text("Neither the watchdog nor anything else has warned.")
    rows = [["log", "line"], *found[:MOST_NOTES]]
    left = len(found) - MOST_NOTES
    return markup.table(rows) + (markup.text(f"{left} more are in {folder.path / 'logs'}.") if left > 0 else "")


def settings(folder: Folder) -> str:
    """Show all settings."""
    return markup.verbatim((folder.path / "config.yaml").read_text(), summary="config.yaml")


def _number(key: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if key.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
