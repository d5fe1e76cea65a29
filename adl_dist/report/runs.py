"""Runs, read from their folders, and their labels."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml

from adl_dist.errors import AdlError, ConfigError, in_one_line
from adl_dist.report.recorder import METRICS, tag_of
from adl_dist.report.timeline import TIMELINE, Timeline
from adl_dist.schedule import Pipeline, method
from adl_dist.settings import REMOVED_OPTIONS

T = TypeVar("T")
REFERENCE = "bp"  # the method that the others are compared with
START = "start.json"  # command, host, device, parameters, software, and each stage's number of units, first and last
CONTENDER = "contender"  # key of config.yaml that names a run of another system, like DDP
# Not part of a label: columns, seeds and places; the method has a label of its own.
NOT_IN_LABELS = (CONTENDER, "method.", "partition.num_stages", "num_stages", "seed", "run_dir", "resume")
OF_SCRIPT = (  # settings that a script's config.yaml has without their group
    *("partition.num_stages", "partition.balance", "partition.tied", "data.shuffle", "train.batch_size"),
    *("train.clip_norm", "train.clip_scope", "train.non_finite", "train.max_skipped", "train.eval_every_updates"),
    *("runtime.autocast", "runtime.codec", "runtime.gradient_codec", "runtime.tf32", "runtime.deterministic"),
    *("runtime.channels_last", "runtime.checkpoint_every_updates", "train.ema"),
)
KEYS = {key.partition(".")[2]: key for key in OF_SCRIPT}
RESUMED = "resumed from"  # how the entry of a start from a checkpoint begins
TIME = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} "
ENTRY = re.compile(rf"{TIME}([A-Z]+) (.*(?:\n(?!{TIME[1:]}).*)*)", re.MULTILINE)
LONGEST_RECORD = 4096  # bytes of a line of metrics.jsonl, at most
Status = Literal["complete", "diverged", "unfinished"]
# Exceptions that files of another version, damaged or edited ones raise.
DAMAGE = (AdlError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError, yaml.YAMLError)


class Point(NamedTuple):
    """One value of a curve, with the training done by then."""

    update: int  # index
    epoch: float  # epochs, also parts of one
    samples: int
    seconds: float  # without validation and saving
    value: float


class Entry(NamedTuple):
    """One entry of a log: a line with a time, and the lines after it."""

    rank: str  # the log's name, like "rank0"
    time: str
    level: str  # as logging calls it
    text: str


def read_logs(folder: Path) -> list[Entry]:
    """Return all processes' log entries by time, or raise OSError."""
    texts = {path.stem: path.read_text(errors="replace") for path in sorted((folder / "logs").glob("rank*.log"))}
    entries = [Entry(rank, *found.group(1, 2, 3)) for rank, text in texts.items() for found in ENTRY.finditer(text)]
    return sorted(entries, key=lambda entry: entry.time)


def _object_in(path: Path) -> dict[str, Any]:
    content = (yaml.safe_load if path.suffix == ".yaml" else json.loads)(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("expected an object")
    return content


def _content(name: str, default: Any, read: Callable[[Path], Any] = _object_in) -> Any:
    """Return a property of a run: the content of a file, or a default."""
    return cached_property(lambda run: run.load(name, read, default))


class Run:
    """One run folder. Runs that differ only in K and seed share a label.

    Attributes:
        problems: a line for each file that cannot be used.
        method: name and options; of another system only its name. Empty if unknown.
        pipeline: the schedule; None if unknown, and of another system.
        num_stages: K, or 0 if it is unknown.
        curves: points by name, like ``validation/loss``; names of stages end with their number.
    """

    config = _content("config.yaml", {})
    summary = _content("summary.json", {})
    divergence = _content("diverged.json", {})
    start = _content(START, {})  # of the newest start
    timeline = _content(TIMELINE, None, Timeline.read)  # the actions of a few updates
    logs = _content("logs", (), lambda path: read_logs(path.parent))
    units = _content("profile.json", (), lambda path: _object_in(path)["units"])  # the measured cost of each unit
    links = _content("links.json", {})  # the measured links

    def __init__(self, folder: Path) -> None:
        """Read the run in ``folder``; damaged files become its problems.

        Raises:
            ConfigError: If there is no run.
        """
        if not any((folder / name).is_file() for name in ("config.yaml", METRICS, "summary.json")):
            raise ConfigError(
                f"{folder} holds no run: expected config.yaml, {METRICS} or summary.json, as adl-dist train writes "
                "them; give run folders"
            )
        self.folder, self.problems = folder, list[str]()
        self.method: Mapping[str, Any] = {}
        self.pipeline: Pipeline | None = None
        self.status: Status = "complete" if self.summary else "diverged" if self.divergence else "unfinished"
        self.label = ""
        self.curves: Mapping[str, Sequence[Point]] = self.load(METRICS, lambda path: _curves(self, path), {})
        self.num_stages = 0
        with self._noting("summary.json"):
            self.num_stages = len(self.summary.get("stages", ()))
        for read in (self._read_method, self._read_status) if self.config else ():
            with self._noting("config.yaml"):
                read()

    def _read_status(self) -> None:
        if (train := self.config.get("train")) is not None:
            self.status = status_of(self.folder, epochs=train["epochs"], max_updates=train.get("max_updates"))

    def _read_method(self) -> None:
        self.num_stages = int(self.config.get("partition", self.config)["num_stages"])
        if CONTENDER in self.config:
            self.method, self.label = {"name": self.config[CONTENDER]}, self.config[CONTENDER]
            return
        self.label, self.method = method_label(self.config["method"]), self.config["method"]
        settings = {name: value for name, value in self.method.items() if name not in REMOVED_OPTIONS}
        delays = self.folder / "delays.json"
        if settings.get("delay") == "auto" and delays.is_file():
            settings["delay"] = json.loads(delays.read_text())
        self.pipeline = Pipeline(method(settings.pop("name"), **settings), self.num_stages)

    @property
    def is_of_script(self) -> bool:
        """Whether the run is a script's: its config.yaml lacks many settings."""
        return "partition" not in self.config

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def first_update(self) -> int:
        """The first recorded update; above 0 if the run continues another."""
        return next((point.update for point in self.curves.get("train/loss", ())), 0)

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches per update, M; 1 if the run does not record it."""
        return int(self.method.get("accumulation_steps", 1))

    @property
    def result(self) -> Mapping[str, Any]:
        """The summary of a complete run, otherwise {}."""
        return self.summary if self.status == "complete" else {}

    @property
    def unit(self) -> str:
        """The unit of the speed: ``images``, ``samples`` or ``tokens``."""
        return str(self.summary.get("unit", "images"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted names; shapes of a model as parameter count."""
        flat = {KEYS.get(key, key): value for key, value in flatten(self.config).items()}
        shapes = [flat.pop(key) for key in [*flat] if key.startswith("model.") and isinstance(flat[key], list)]
        return flat | ({"model.parameters": sum(map(math.prod, shapes))} if shapes else {})

    def finite(self, name: str) -> list[Point]:
        """Return the points of a curve that have finite values."""
        return [point for point in self.curves.get(name, ()) if math.isfinite(point.value)]

    def load(self, name: str, read: Callable[[Path], T], default: T) -> T:
        """Return the content of a file, or ``default``; note if it is damaged."""
        path = self.folder / name
        with self._noting(name):
            if path.exists():
                return read(path)
        return default

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Note a problem if the file ``name``, read in the block, is damaged."""
        try:
            yield
        except DAMAGE as error:
            self.problems.append(f"{name} cannot be used ({in_one_line(error)[:200]})")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if it cannot be read."""
    try:
        return _object_in(path)
    except (OSError, ValueError):
        return {}


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read run folders, and label them by the settings that differ.

    Raises:
        ConfigError: If a folder is not that of a run.
    """
    runs = [Run(folder) for folder in folders]
    add_labels(runs)
    return runs


def add_labels(runs: Sequence[Run]) -> None:
    """Add the settings in which ``runs`` differ to their labels.

    Raises:
        ConfigError: If the settings of a run are not known.
    """
    for run in runs:
        if not run.method or not run.num_stages:
            problems = "; ".join(run.problems) or "no method in config.yaml"
            raise ConfigError(
                f"{run.folder}: expected the folder of a run made by adl-dist train or Trainer.fit, got files that do "
                f"not describe one ({problems}); give run folders"
            )
    keys = [key for key, those in comparable(runs).items() if _tells_apart(key, those)]
    telling = [key for key in keys if not key.startswith(NOT_IN_LABELS)]
    for run in runs:
        given = {key: run.settings.get(key) for key in telling}
        kind = ["(script)"] if run.is_of_script and not all(one.is_of_script for one in runs) else []
        run.label = " ".join([run.label, *kind, *(f"{k}={value}" for k, value in given.items() if value is not None)])


def comparable(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return by each key the settings to compare; a script's lack many keys."""
    is_mixed = len({run.is_of_script for run in runs}) > 1
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return {key: [run.settings for run in runs if key in run.settings or not is_mixed] for key in keys}


def status_of(folder: Path, *, epochs: int, max_updates: int | None) -> Status:
    """Return ``complete``, ``diverged`` or ``unfinished`` for a run folder.

    A run that a callback has ended, as EarlyStopping does, is complete unless it was continued.
    """
    summary = read_json(folder / "summary.json")
    done = summary.get("updates", 0)
    is_long = summary.get("epochs", 0) >= epochs or (max_updates is not None and done >= max_updates)
    if is_long or ("ended_by" in summary and done > _newest_update(folder)):
        return "complete"
    return "diverged" if (folder / "diverged.json").is_file() else "unfinished"


def _newest_update(folder: Path) -> int:
    """Return the newest update in the records or the divergence of a run."""
    newest = [-1, int(read_json(folder / "diverged.json").get("update", -1))]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), (folder / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_RECORD))
        whole = file.read().rpartition(b"\n")[0]  # a killed process may leave half a line
        newest.append(int(json.loads(whole.rpartition(b"\n")[2])["update"]))
    return max(newest)


def _curves(run: Run, path: Path) -> dict[str, list[Point]]:
    """Return all curves, with one clock of training for all segments."""
    records = list(_records(run, path))
    updates: dict[int, list[int]] = {}  # of each epoch
    for record in records:
        updates.setdefault(record["epoch"], []).append(record["update"])
    first = {epoch: min(each) for epoch, each in updates.items()}
    length = {epoch: max(each) - min(each) + 1 for epoch, each in updates.items()}
    longest, last = max(length.values(), default=1), max(updates, default=0)
    curves = dict[str, list[Point]]()
    before = of_segments = seconds = 0.0
    of_epoch = 0
    losses = (record for record in records if record["name"] == "train/loss")
    first_loss = next(losses, {"update": 0})
    samples = first_loss["update"] * int(first_loss.get("num_samples", 0))  # of a run that this one continues
    for record in records:
        update, number, elapsed = record["update"], record["epoch"], record.get("elapsed_seconds")
        epoch = number + (update - first[number] + 1) / (longest if number == last else length[number])
        if record["name"] == "train/loss":
            samples += int(record.get("num_samples", 0))
        if isinstance(elapsed, (int, float)) and math.isfinite(elapsed):
            if elapsed < before or number != of_epoch:  # of the next segment
                of_segments, before = of_segments + before, 0.0
            of_epoch = number
            seconds, before = of_segments + elapsed, elapsed
        point = Point(update, epoch, samples, seconds, float(record["value"]))
        curves.setdefault(tag_of(record), []).append(point)
    return curves


def _records(run: Run, path: Path) -> Iterator[dict[str, Any]]:
    """Yield intact records of metrics.jsonl; note how many are damaged."""
    num_damaged = 0
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
    if num_damaged:
        run.problems.append(f"{num_damaged} lines of {METRICS} cannot be read and are left out")


def method_label(chosen: Mapping[str, Any]) -> str:
    """Return the method's name with M and settings that are not its defaults."""
    name, M = chosen["name"], chosen["accumulation_steps"]
    usual = REMOVED_OPTIONS | method(name).settings | {"name": name, "accumulation_steps": M}
    special = [f"{key}={value}" for key, value in chosen.items() if value != usual.get(key)]
    return " ".join([name, *([f"M={M}"] if M > 1 else []), *special])


def _tells_apart(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether ``key`` has several values in comparable ``configs``.

    Keys of the cut are compared among runs of one K, keys of an optimizer or the like among runs of one class.
    """
    group = key.partition(".")[0]
    of = {f"{group}.name", f"{group}._target_", *(["partition.num_stages"] * (group == "partition"))} - {key}
    values = {(*(str(config.get(name)) for name in of), str(config.get(key))) for config in configs}
    return len(values) > len({value[:-1] for value in values})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


class Measure(NamedTuple):
    """The figure that runs are compared by."""

    name: str
    unit: str
    scale: float

    @property
    def key(self) -> str:
        """The figure's name in summary.json."""
        return self.name.replace("/", "_")

    def values(self, runs: Iterable[Run]) -> list[float]:
        """Return the final figure of each complete run that has it."""
        return [run.result[self.key] * self.scale for run in runs if run.result.get(self.key) is not None]

    def text(self, value: float) -> str:
        """Return the value without its unit."""
        return f"{value:.2f}" if self.scale == 100 else f"{value:.4f}"


ACCURACY, LOSS = Measure("validation/accuracy", " %", 100), Measure("validation/loss", "", 1)


def measure_of(runs: Sequence[Run]) -> Measure:
    """Return the measure that runs are compared by.

    It is ``runtime.best_metric`` if all runs have the same, otherwise accuracy if any run has one, otherwise the loss.
    """
    chosen = {run.settings.get("runtime.best_metric") for run in runs}
    metric = chosen.pop() if len(chosen) == 1 else None
    if metric == LOSS.key:
        return LOSS
    if metric not in (None, ACCURACY.key):
        return Measure(metric.replace("_", "/", 1), "", 1)
    return ACCURACY if any(run.finite(ACCURACY.name) for run in runs) else LOSS
