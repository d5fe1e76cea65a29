"""The records of a run, written to metrics.jsonl and to each logger."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.files import write_atomically
from adl_dist.report.loggers import LOGGERS, TENSORBOARD, Logger, TensorBoard
from adl_dist.report.warning import warn

METRICS = "metrics.jsonl"
STALENESS = "stage/staleness"


class MetricsWriter:
    """A writer of records ``{"name", "value", "update", "epoch", ...}``.

    A record of a whole epoch has the index of its last update. A disk that fails costs records, never the run.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        loggers: Sequence[Any] = (),
        settings: Mapping[str, Any] | None = None,
        call: Callable[[Callable[[], object]], object] | None = None,
        stages_every: int = 1,
    ) -> None:
        """Write into ``folder``, if it is given, and to ``loggers``.

        Args:
            folder: the run folder; without it nothing is written.
            loggers: names of loggers, or the user's own.
            settings: the run's settings, for the loggers.
            call: runs a call of the user's code now or later, by default now.
            stages_every: updates between two records of stages' figures.
        """
        self._folder, self._settings, self._stages_every = folder, settings or {}, stages_every
        self._call = call if call is not None else lambda make: make()
        self._wanted = loggers if folder is not None else ()
        self._running: list[tuple[str, Logger]] = []
        self._file: io.FileIO | None = None
        self._size = 0  # of the file, in whole lines
        self._is_failing = False
        self._offsets: dict[int, list[int]] = {}  # staleness of each stage's backwards since its last record

    def start(self, *, from_update: int) -> None:
        """Open the files, and drop records from ``from_update`` on.

        These updates are now made again.

        Raises:
            ConfigError: If a logger cannot start.
        """
        if self._folder is None:
            return
        path = self._folder / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # A process that was killed may have left half a line.
        kept = [line for line in lines if line.endswith(b"\n") and _update_of(line) < from_update]
        try:
            with write_atomically(path) as unfinished:
                unfinished.write_bytes(b"".join(kept))
            self._file = io.FileIO(path, "a")
            self._size = sum(len(line) for line in kept)
        except OSError as error:
            warn(f"{path} cannot be written ({error.strerror}); training continues without records")
            return
        for one in self._wanted:
            made: Logger = LOGGERS[one][0]() if isinstance(one, str) else one
            name = type(made).__name__
            try:
                made.start(self._folder, self._settings, from_update)
            except Exception as error:  # another package, or the user's own code
                if isinstance(made, TensorBoard) and isinstance(error, OSError):
                    warn(f"logger {name} cannot start ({error.strerror or error}); the run continues without it")
                    continue
                raise ConfigError(
                    f"logger {name} cannot start: {in_one_line(error)}; correct what it names, or take it "
                    "from runtime.loggers"
                ) from error
            self._running.append((name, made))

    @property
    def has_loggers(self) -> bool:
        """Whether there are loggers other than metrics.jsonl and TensorBoard, which draws no random number."""
        return any(one != TENSORBOARD for one in self._wanted)

    def write_of_update(self, record: dict[str, Any]) -> None:
        """Write a record of an update; figures of stages only every few updates.

        Staleness is the mean since the record before.
        """
        is_due = record["update"] % self._stages_every == 0
        if record["name"] == STALENESS:
            offsets = self._offsets.setdefault(record["stage"], [])
            offsets += record["by_offset"]
            if is_due:
                record = {**record, "value": sum(offsets) / len(offsets), "max": max(offsets)}
                offsets.clear()
        if is_due or not record["name"].startswith("stage/"):
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""
        if self._file is not None:
            self._append(self._file, json.dumps(record).encode() + b"\n")
        write = partial(self._each, lambda one: one.write(record))
        if self.has_loggers:
            self._call(write)
        else:
            write()

    def flush(self) -> None:
        """Write everything to disk."""
        with contextlib.suppress(OSError):  # reported before
            if self._file is not None:
                os.fsync(self._file.fileno())
        self._each(lambda one: one.flush())

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._each(lambda one: one.close())

    def _each(self, call: Callable[[Logger], object]) -> None:
        """Call each logger; close and drop those that fail, because a run is worth more."""
        for name, one in [*self._running]:
            try:
                call(one)
            except Exception as error:  # another package, or the user's own code
                reason = (error.strerror if isinstance(error, OSError) else None) or in_one_line(error)
                warn(f"logger {name} fails ({reason}); the run continues without it")
                self._running.remove((name, one))
                with contextlib.suppress(Exception):
                    one.close()

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Append a line whole or not at all."""
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(0, "the disk is full")
            self._size += len(line)
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(self._size)
            if not self._is_failing:
                self._is_failing = True
                warn(f"{file.name!s} cannot be written ({error.strerror}); records are lost until it can")


def _update_of(line: bytes) -> float:
    """Return a record's update, or infinity if it is unreadable."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
