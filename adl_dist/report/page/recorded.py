"""The records of a run folder; damaged ones are named, missing ones empty."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from adl_dist.errors import AdlError, ConfigError, in_one_line
from adl_dist.report.loggers import tag_of
from adl_dist.report.logs import Entry, read_logs
from adl_dist.report.recorder import METRICS
from adl_dist.report.runs import read_json, status_of
from adl_dist.report.timeline import Timeline
from adl_dist.schedule import Pipeline, method
from adl_dist.settings import REMOVED_OPTIONS

T = TypeVar("T")


class Point(NamedTuple):
    """One value of a curve."""

    update: int
    epoch: float  # epochs trained by then, not whole ones only
    seconds: float  # of training, without validation and saving
    value: float


class Piece(NamedTuple):
    """A stage's part of a checkpoint."""

    tensors: Sequence[str]  # their names, in its order
    weight_bytes: int
    optimizer_bytes: int


@dataclass(kw_only=True)
class Recorded:
    """The content of one run folder; ``problems`` name unreadable files."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    status: str = "unfinished"  # complete, diverged, stopped or unfinished
    summary: Mapping[str, Any] = field(default_factory=dict)
    divergence: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)  # by name, of a stage with its number
    speeds: Sequence[Point] = ()  # samples or tokens per second between two updates
    num_stages: int = 0  # K; 0 if nothing says it
    pipeline: Pipeline | None = None
    timeline: Timeline | None = None
    logs: Sequence[Entry] = ()
    updates_per_epoch: int = 0  # 0: not known
    balance: Sequence[int] = ()  # units of each stage
    pieces: Sequence[Piece] = ()
    units: Sequence[Mapping[str, Any]] = ()  # the measured costs of the model's units
    links: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """The unit of the speed: ``images``, ``samples`` or ``tokens``."""
        return str(self.summary.get("unit", "images"))


def read(folder: Path) -> Recorded:
    """Read the run in ``folder``.

    Raises:
        ConfigError: there is no run.
    """
    if not any((folder / name).is_file() for name in ("config.yaml", METRICS, "summary.json")):
        raise ConfigError(
            f"{folder} holds no run: expected config.yaml, {METRICS} or summary.json, as adl-dist train writes them; "
            "give the folder of a run"
        )
    run = Recorded(folder=folder)
    run.config = _tried(run, folder / "config.yaml", _read_config) or {}
    run.summary = _tried(run, folder / "summary.json", _read_object) or {}
    run.divergence = _tried(run, folder / "diverged.json", _read_object) or {}
    run.timeline = _tried(run, folder / "timeline.json", lambda path: Timeline.read(path.parent))
    run.logs = _tried(run, folder / "logs", lambda path: read_logs(path.parent)) or []
    run.units = _tried(run, folder / "profile.json", _read_units) or ()
    run.links = _tried(run, folder / "links.json", _read_object) or {}
    _tried(run, folder / "checkpoints", lambda path: _read_checkpoint(run, path))
    _read_curves(run)
    run.num_stages = _tried(run, folder / "summary.json", lambda path: len(run.summary.get("stages", ()))) or 0
    _tried(run, folder / "config.yaml", lambda path: _read_pipeline(run))
    run.status = _status(run)
    return run


def _tried(run: Recorded, path: Path, read: Callable[[Path], T]) -> T | None:
    """Read ``path``, or return None and note a problem if it is damaged."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, yaml.YAMLError, AdlError) as error:
        run.problems.append(f"{path.name} cannot be used ({in_one_line(error)[:200]})")
        return None


def _read_config(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("expected settings")
    return content


def _read_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("expected an object")
    return content


def _read_units(path: Path) -> list[dict[str, Any]]:
    return [
        {"name": str(unit["name"]), "forward": float(unit["forward"]), "backward": float(unit["backward"]), **unit}
        for unit in _read_object(path)["units"]
    ]


def _sizes(cut: Mapping[str, Any], units: Sequence[str]) -> list[int]:
    """Return the units of each stage; empty if the units are not known."""
    begins = cut.get("begins", [])
    if not set(begins) <= set(units) or not units:
        return [int(size) for size in cut.get("balance", [])]
    borders = [0, *(units.index(name) for name in begins), len(units)]
    return [stop - start for start, stop in pairwise(borders)]


def _read_checkpoint(run: Recorded, path: Path) -> None:
    """Read the cut and the length of an epoch out of the newest checkpoint."""
    for folder in sorted(path.glob("update-*"), reverse=True):
        if not (manifest := read_json(folder / "manifest.json")):
            continue
        identity: Mapping[str, Any] = manifest["identity"]
        run.updates_per_epoch = math.ceil(
            identity["num_samples"] / (identity["micro_batch_size"] * identity["accumulation_steps"])
        )
        run.balance = _sizes(identity["cut"], [unit["name"] for unit in run.units])
        where = read_json(folder / "model.safetensors.index.json").get("weight_map", {})
        files: Mapping[str, Any] = manifest["files"]
        run.pieces = [
            Piece(
                [name for name, file in where.items() if file == weights],
                int(files[weights]["bytes"]),
                int(files.get(weights.replace("model-", "optimizer-"), {}).get("bytes", 0)),
            )
            for weights in sorted({*where.values()})
        ]
        return


def _read_pipeline(run: Recorded) -> None:
    """Read K and the method."""
    run.num_stages = int(run.config.get("partition", run.config)["num_stages"])
    settings = {name: value for name, value in run.config["method"].items() if name not in REMOVED_OPTIONS}
    delays = run.folder / "delays.json"
    if settings.get("delay") == "auto" and delays.is_file():
        settings["delay"] = json.loads(delays.read_text())
    run.pipeline = Pipeline(method(settings.pop("name"), **settings), run.num_stages)


def _status(run: Recorded) -> str:
    if "stopped" in run.summary:
        return "stopped"
    train = run.config.get("train")
    if isinstance(train, Mapping):
        try:
            return status_of(run.folder, epochs=train["epochs"], max_updates=train.get("max_updates"))
        except (KeyError, TypeError):
            run.problems.append("config.yaml does not say how long the run was to be")
    return "complete" if run.summary else "diverged" if run.divergence else "unfinished"


def _read_curves(run: Recorded) -> None:
    records = list(_records(run))
    in_epochs: dict[int, list[int]] = {}
    for record in records:
        in_epochs.setdefault(record["epoch"], []).append(record["update"])
    longest = max((max(updates) - min(updates) + 1 for updates in in_epochs.values()), default=1)
    per_epoch = run.updates_per_epoch or longest
    curves: dict[str, list[Point]] = {}
    speeds: list[Point] = []
    before = of_segments = seconds = 0.0
    of_epoch = 0
    counted = "num_terms" if run.unit == "tokens" else "num_samples"
    for record in records:
        update, elapsed = record["update"], record.get("elapsed_seconds")
        epoch = (update + 1) / per_epoch
        if isinstance(elapsed, (int, float)) and math.isfinite(elapsed):
            if elapsed < before or record["epoch"] != of_epoch:  # of the next segment, whose time begins again
                of_segments, before = of_segments + before, 0.0
            of_epoch = record["epoch"]
            seconds = of_segments + elapsed
            if elapsed > before and isinstance(record.get(counted), (int, float)):
                speeds.append(Point(update, epoch, seconds, record[counted] / (elapsed - before)))
            before = elapsed
        curves.setdefault(tag_of(record), []).append(Point(update, epoch, seconds, float(record["value"])))
    run.curves, run.speeds = curves, speeds


def _records(run: Recorded) -> Iterator[dict[str, Any]]:
    path, num_damaged = run.folder / METRICS, 0
    if not path.is_file():
        return
    try:
        with path.open(errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    tag_of(record), float(record["value"])
                    if type(record["update"]) is not int or type(record["epoch"]) is not int:
                        raise TypeError
                    yield record
                except (ValueError, TypeError, KeyError, AttributeError):
                    num_damaged += 1
    except OSError as error:
        run.problems.append(f"{METRICS} cannot be read ({error.strerror})")
    if num_damaged:
        run.problems.append(f"{num_damaged} lines of {METRICS} cannot be read and are left out")
