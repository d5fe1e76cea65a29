"""The runs that a comparison is about, and what they are compared by."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adl_dist.report.recorder import METRICS

REFERENCE = "bp"  # the method that the others are compared with


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run and what became of it.

    Attributes:
        label: of its row; runs that differ in K and seed only have the same.
        num_stages: K.
        accumulation_steps: M.
        method: the method's name and settings.
        seed: of the run.
        folder: its run folder.
        status: ``complete``, ``diverged`` or ``failed``.
        ended_at_update: where it diverged.
        ended_in_epoch: the same, counted from 0.
    """

    label: str
    num_stages: int
    accumulation_steps: int
    method: Mapping[str, Any]
    seed: int
    folder: Path
    status: str
    ended_at_update: int | None = None
    ended_in_epoch: int | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Of a complete run; of any other nothing, whatever an earlier, shorter one left."""
        if self.status != "complete":
            return {}
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The finite values of ``name``, like ``validation/loss``, each after so many whole epochs."""
        return [(epoch + 1, value) for epoch, value in self._curves.get(name, []) if math.isfinite(value)]

    @cached_property
    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        curves: dict[str, list[tuple[int, float]]] = {}
        path = self.folder / METRICS
        for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
            if '"validation/' in line and line.endswith("\n"):
                record = json.loads(line)
                curves.setdefault(record["name"], []).append((record["epoch"], record["value"]))
        return curves


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What runs are compared by: accuracy where there are classes, else the loss."""

    name: str
    unit: str
    scale: float
    best: Callable[..., float]

    @property
    def key(self) -> str:
        """Of ``summary.json``."""
        return self.name.replace("/", "_")

    def of(self, run: Run) -> float | None:
        """The value at the end of ``run``, if it has come there."""
        value = run.summary.get(self.key)
        return None if value is None else value * self.scale

    def text(self, value: float) -> str:
        """The value without its unit."""
        return f"{value:.2f}" if self.scale == 100 else f"{value:.4f}"


ACCURACY = Measure(name="validation/accuracy", unit=" %", scale=100, best=max)
LOSS = Measure(name="validation/loss", unit="", scale=1, best=min)
