"""Finished runs, read from their folders, and their labels."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from adl_dist.errors import ConfigError
from adl_dist.report.recorder import METRICS
from adl_dist.schedule import method
from adl_dist.settings import REMOVED_OPTIONS

REFERENCE = "bp"  # the method that the others are compared with
CONTENDER = "contender"  # key of config.yaml that names a run of another system, like DDP
# Not part of a label: columns, seeds and places; the method has a label of its own.
NOT_IN_LABELS = (CONTENDER, "method.", "partition.num_stages", "seed", "run_dir", "resume")
LONGEST_RECORD = 4096  # bytes of a line of metrics.jsonl, at most
Status = Literal["complete", "diverged", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder. Runs that differ only in K and seed share a label.

    Attributes:
        config: content of config.yaml.
        summary: content of summary.json, or {} unless the run is complete.
        divergence: content of diverged.json, or {} unless the run has diverged.
        curves: for names like ``validation/loss``, pairs of whole epochs and the finite value after them.
    """

    folder: Path
    config: Mapping[str, Any]
    num_stages: int
    accumulation_steps: int
    method: Mapping[str, Any]
    seed: int
    status: Status
    label: str
    summary: Mapping[str, Any]
    divergence: Mapping[str, Any]
    curves: Mapping[str, Sequence[tuple[int, float]]]


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


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read run folders, and label them by the settings that differ.

    Raises:
        ConfigError: If a folder is not a run folder made by the command line.
    """
    runs = []
    for folder in folders:
        try:
            runs.append(_read(folder))
        except (OSError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{folder}: expected the folder of a run made by adl-dist train, got files that do not "
                f"describe one ({type(error).__name__}: {error}); give run folders"
            ) from error
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    telling = [key for key in keys if not key.startswith(NOT_IN_LABELS) and _tells_apart(key, flat)]
    return [
        replace(run, label=" ".join([run.label, *(f"{key}={one[key]}" for key in telling if key in one)]))
        for run, one in zip(runs, flat, strict=True)
    ]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read(folder: Path) -> Run:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    train, chosen = config["train"], config["method"]
    status = status_of(folder, epochs=train["epochs"], max_updates=train["max_updates"])
    return Run(
        folder=folder,
        config=config,
        num_stages=int(config["partition"]["num_stages"]),
        accumulation_steps=1 if CONTENDER in config else int(chosen["accumulation_steps"]),
        method={"name": config[CONTENDER]} if CONTENDER in config else chosen,
        seed=int(config["seed"]),
        status=status,
        label=config.get(CONTENDER) or method_label(chosen),
        summary=read_json(folder / "summary.json") if status == "complete" else {},
        divergence=read_json(folder / "diverged.json") if status == "diverged" else {},
        curves=_validation_curves(folder / METRICS),
    )


def _validation_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
        if '"validation/' in line and line.endswith("\n"):
            record = json.loads(line)
            if math.isfinite(record["value"]):
                curves.setdefault(record["name"], []).append((record["epoch"] + 1, record["value"]))
    return curves


def method_label(chosen: Mapping[str, Any]) -> str:
    """Return the method's name with M and settings that are not its defaults."""
    name, M = chosen["name"], chosen["accumulation_steps"]
    usual = REMOVED_OPTIONS | method(name).settings
    others = {key: value for key, value in chosen.items() if key not in ("name", "accumulation_steps")}
    special = [f"{key}={value}" for key, value in others.items() if value != usual.get(key)]
    return " ".join([name, *([f"M={M}"] if M > 1 else []), *special])


def _tells_apart(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether ``key`` has several values (of the cut: for one K)."""
    depends_on = "partition.num_stages" if key.startswith("partition.") else ""
    values = {(config.get(depends_on), str(config.get(key))) for config in configs}
    return len(values) > len({first for first, _ in values})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The figure that runs are compared by: accuracy, or the loss."""

    name: str
    unit: str
    scale: float

    @property
    def key(self) -> str:
        """The figure's name in summary.json."""
        return self.name.replace("/", "_")

    def values(self, runs: Iterable[Run]) -> list[float]:
        """Return the final figure of each complete run that has it."""
        return [run.summary[self.key] * self.scale for run in runs if run.summary.get(self.key) is not None]

    def text(self, value: float) -> str:
        """Return the value without its unit."""
        return f"{value:.2f}" if self.scale == 100 else f"{value:.4f}"


ACCURACY = Measure(name="validation/accuracy", unit=" %", scale=100)
LOSS = Measure(name="validation/loss", unit="", scale=1)


def measure_of(runs: Sequence[Run]) -> Measure:
    """Return the accuracy if any run has one, otherwise the loss."""
    return ACCURACY if any(ACCURACY.name in run.curves for run in runs) else LOSS
