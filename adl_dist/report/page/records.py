"""What a run folder holds of one run, read for its page."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adl_dist.report.recorder import METRICS
from adl_dist.report.runs import read_json

Record = Mapping[str, Any]
GRAVE = (" WARNING ", " ERROR ", " CRITICAL ")


def read_records(folder: Path) -> dict[str, list[Record]]:
    """Return the records of metrics.jsonl by their names; a line that is damaged is left out."""
    found: dict[str, list[Record]] = defaultdict(list)
    path = folder / METRICS
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            if math.isfinite(record["value"]) and isinstance(record["update"], int):
                found[str(record["name"])].append(record)
        except (ValueError, TypeError, KeyError):
            continue
    return dict(found)


def training_seconds(losses: Sequence[Record]) -> dict[int, float]:
    """Return for each update the seconds of training until then; ``elapsed_seconds`` counts from 0 in each epoch."""
    seconds, before, last = dict[int, float](), 0.0, 0.0
    for record in losses:
        elapsed = float(record.get("elapsed_seconds", last))
        if elapsed < last:  # the next epoch, or the part of one after a checkpoint in its midst
            before += last
        last = elapsed
        seconds[record["update"]] = before + elapsed
    return seconds


def newest_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of the newest checkpoint's manifest.json; {} if there is none that can be read."""
    for path in sorted(folder.glob("checkpoints/update-*/manifest.json"), reverse=True):
        if content := read_json(path):
            return content
    return {}


def notes_in_logs(folder: Path) -> list[tuple[str, str]]:
    """Return what the ranks' logs have of warnings and errors, as pairs of the log's name and the line."""
    return [
        (path.stem, line)
        for path in sorted(folder.glob("logs/rank*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(level in line for level in GRAVE)
    ]


@dataclass(frozen=True)
class Timeline:
    """Some steady updates of a trace: for each stage what it did, as (share, label, begin, seconds)."""

    first_update: int
    num_updates: int
    stages: Mapping[int, Sequence[tuple[str, str, float, float]]]


def steady_updates(path: Path, *, most: int = 3) -> Timeline | None:
    """Return the middle updates of the last whole epoch in a trace; None: there is no trace, or no update in it.

    Times are seconds since the first of them began. ``path``: see :mod:`adl_dist.monitor.trace`.
    """
    events = list(_training_events(path))
    if not events:
        return None
    epoch = max(event["args"]["epoch"] for event in events)
    events = [event for event in events if event["args"]["epoch"] == epoch]
    ends = sorted((_end(e), e["args"]["update"]) for e in events if "update" in e["args"] and e["pid"] == 0)
    if len(ends) < 2:
        return None
    number = min(most, len(ends) - 1)
    start = (len(ends) - 1 - number) // 2
    begin, end = ends[start][0], ends[start + number][0]
    stages: dict[int, list[tuple[str, str, float, float]]] = defaultdict(list)
    for event in events:
        left, right = max(event["ts"], begin), min(_end(event), end)
        if right > left:
            label = str(event["args"].get("action", ""))
            stages[event["pid"]].append((str(event["cat"]), label, (left - begin) / 1e6, (right - left) / 1e6))
    return Timeline(ends[start + 1][1], number, dict(sorted(stages.items())))


def _training_events(path: Path) -> Iterator[dict[str, Any]]:
    for event in read_json(path).get("traceEvents", ()):
        if event.get("ph") == "X" and "epoch" in event.get("args", {}):
            yield event


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])
