"""The files of a run folder that only its page shows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from adl_dist.report.logs import Entry, read_logs
from adl_dist.report.runs import START, Run, an_object, read_json
from adl_dist.report.timeline import TIMELINE, Timeline


class Piece(NamedTuple):
    """A stage's part of a checkpoint, in bytes."""

    weights: int
    optimizer: int


@dataclass(kw_only=True)
class Files:
    """The content of these files, empty for missing and damaged ones.

    Attributes:
        start: command, host, device and units of stages of the newest start.
        units: the measured cost of each unit of the model.
        sizes: units of each stage.
        links: measured links.
        pieces: of each stage, from the newest checkpoint.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    logs: Sequence[Entry] = ()
    units: Sequence[Mapping[str, Any]] = ()
    sizes: Sequence[int] = ()
    links: Mapping[str, Any] = field(default_factory=dict)
    pieces: Sequence[Piece] = ()


def read_files(run: Run) -> Files:
    """Read the files of ``run``; damaged ones become its problems."""
    files = Files(
        start=run.load(START, lambda path: an_object(json.loads(path.read_text()))) or {},
        timeline=run.load(TIMELINE, lambda path: Timeline.read(path.parent)),
        logs=run.load("logs", lambda path: read_logs(path.parent)) or (),
        units=run.load("profile.json", _read_units) or (),
        links=run.load("links.json", lambda path: an_object(json.loads(path.read_text()))) or {},
    )
    run.load("checkpoints", lambda path: _read_checkpoint(files, path))
    return files


def _read_units(path: Path) -> list[dict[str, Any]]:
    return [
        {"name": str(unit["name"]), "forward": float(unit["forward"]), "backward": float(unit["backward"]), **unit}
        for unit in an_object(json.loads(path.read_text()))["units"]
    ]


def _read_checkpoint(files: Files, path: Path) -> None:
    """Read the cut and the bytes of each stage out of the newest checkpoint."""
    manifests = (read_json(folder / "manifest.json") for folder in sorted(path.glob("update-*"), reverse=True))
    manifest = next(filter(None, manifests), None)
    if manifest is None:
        return
    cut, names = manifest["identity"]["cut"], [unit["name"] for unit in files.units]
    files.sizes = [int(size) for size in cut.get("balance", [])]
    if names and {*cut.get("begins", ())} <= {*names}:
        borders = [0, *(names.index(name) for name in cut["begins"]), len(names)]
        files.sizes = [stop - start for start, stop in pairwise(borders)]
    size = {name: int(file["bytes"]) for name, file in manifest["files"].items()}
    weights = sorted(name for name in size if name.startswith("model") and name.endswith(".safetensors"))
    files.pieces = [Piece(size[name], size.get(name.replace("model", "optimizer", 1), 0)) for name in weights]
