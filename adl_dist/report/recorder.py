"""The records of a run, written to metrics.jsonl and to each logger.

Only rank 0 calls loggers. Their packages read addresses, keys and the experiment's name from their usual environment
variables.
"""

import contextlib
import importlib.util
import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.files import write_atomically
from adl_dist.report.warning import warn

METRICS = "metrics.jsonl"
STALENESS = "stage/staleness"
EXPERIMENT = "adl_dist"
MOST_PENDING = 500  # records sent to MLflow at once; it accepts 1000
LONGEST_PARAM, MOST_PARAMS = 500, 100  # MLflow: characters of a value, values sent at once


@runtime_checkable
class Logger(Protocol):
    """The interface of a receiver of records.

    An exception in ``start`` ends the run, in another method only the logging.
    """

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Begin a run, or continue it from ``from_update`` on."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl."""

    def flush(self) -> None:
        """Write all records taken so far."""

    def close(self) -> None:
        """Close the logger, also after an error."""


def tag_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record's curve, with its stage or process."""
    for kind, number in (("stage/", "stage"), ("process/", "rank")):
        if record["name"].startswith(kind):
            return f"{record['name']}/{record[number]}"
    return str(record["name"])


class TensorBoard:
    """A logger that writes curves into the run folder's ``tensorboard``."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Open a file; it hides older values from ``from_update`` on."""
        from torch.utils.tensorboard import SummaryWriter  # imported late: it costs a second

        board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=from_update)
        self.flush, self.close, self._add = board.flush, board.close, board.add_scalar

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one value to TensorBoard."""
        self._add(tag_of(record), record["value"], record["update"])


class MLflow:
    """A run of MLflow; ``folder/mlflow-run`` keeps its id.

    Its experiment is MLFLOW_EXPERIMENT_NAME or adl_dist.
    """

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Create a run, or continue the one in the folder."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._pending = Metric, list[Any]()
        self._client, kept = MlflowClient(), folder / "mlflow-run"
        if from_update > 0 and kept.is_file():
            self._run_id = kept.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        kept.write_text(self._run_id)
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep one value; many are sent at once."""
        milliseconds = int(time.time() * 1000)
        self._pending.append(self._metric(tag_of(record), float(record["value"]), milliseconds, record["update"]))
        if len(self._pending) >= MOST_PENDING:
            self.flush()

    def flush(self) -> None:
        """Send the kept values."""
        pending, self._pending = self._pending, []
        if pending:
            self._client.log_batch(self._run_id, metrics=pending)

    def close(self) -> None:
        """Send the kept values, and end the run."""
        self.flush()
        self._client.set_terminated(self._run_id)


class WandB:
    """A run of Weights & Biases; ``folder/wandb-run`` keeps its id.

    Its project is WANDB_PROJECT or adl_dist.
    """

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Create a run, or continue the one in the folder."""
        import wandb

        kept = folder / "wandb-run"
        more = {"id": kept.read_text(), "resume": "allow"} if from_update > 0 and kept.is_file() else {}
        project = os.environ.get("WANDB_PROJECT", EXPERIMENT)
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings), **more)
        # Records of stages come in any order, so each has its own update.
        self._run.define_metric("*", step_metric="update")
        kept.write_text(self._run.id)
        self.close = self._run.finish

    def write(self, record: Mapping[str, Any]) -> None:
        """Log one value."""
        self._run.log({tag_of(record): record["value"], "update": record["update"]})

    def flush(self) -> None:
        """Do nothing: wandb's own process sends the values."""


TENSORBOARD = "tensorboard"
LOGGERS: dict[str, Callable[[], Any]] = {TENSORBOARD: TensorBoard, "mlflow": MLflow, "wandb": WandB}  # by their package


def check_loggers(loggers: Sequence[Any]) -> None:
    """Raise ConfigError if a logger is unknown, missing or incomplete."""
    for one in loggers:
        if isinstance(one, str):
            if one not in LOGGERS:
                raise ConfigError(
                    f"runtime.loggers: there is no '{one}'; choose of {', '.join(LOGGERS)}, or give an object of "
                    "your own, on the command line by what makes it, my.module.make"
                )
            if importlib.util.find_spec(one) is None:
                raise ConfigError(f"runtime.loggers: {one} is not installed here: pip install {one}")
        elif isinstance(one, type) or not isinstance(one, Logger):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise ConfigError(f"runtime.loggers: expected an object with start, write, flush and close, got {kind}")


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
        call: Callable[[Callable[[], object]], object] = lambda make: make(),
        stages_every: int = 1,
    ) -> None:
        """Write into ``folder``, if it is given, and to ``loggers``.

        Args:
            folder: the run folder; without it nothing is written.
            loggers: names of loggers, or the user's own.
            settings: the run's settings, for the loggers.
            call: runs a call of the user's code now or later.
            stages_every: updates between two records of stages' figures.
        """
        self._folder, self._settings, self._call, self._stages_every = folder, settings or {}, call, stages_every
        self._wanted = loggers if folder is not None else ()
        self._running: list[Any] = []
        self._file: io.FileIO | None = None
        self._size = 0  # of the file, in whole lines
        self._is_failing = False
        self._offsets: dict[int, list[int]] = {}  # staleness of each stage's backwards since its last record

    def start(self, *, from_update: int, is_evaluated: bool = True) -> None:
        """Open the files, and drop records from ``from_update`` on.

        The run makes these updates again, and the evaluation before them unless ``is_evaluated``.

        Raises:
            ConfigError: If a logger cannot start.
        """
        if self._folder is None:
            return
        path = self._folder / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # A process that was killed may have left half a line.
        first = (from_update, False) if is_evaluated else (from_update - 1, True)
        kept = [line for line in lines if line.endswith(b"\n") and _place_of(line) < first]
        try:
            with write_atomically(path) as unfinished:
                unfinished.write_bytes(b"".join(kept))
            self._file = io.FileIO(path, "a")
            self._size = sum(len(line) for line in kept)
        except OSError as error:
            warn(f"{path} cannot be written ({error.strerror}); training continues without records")
            return
        for one in self._wanted:
            made = LOGGERS[one]() if isinstance(one, str) else one
            try:
                made.start(self._folder, self._settings, from_update)
            except Exception as error:  # another package, or the user's own code
                name = type(made).__name__
                if isinstance(made, TensorBoard) and isinstance(error, OSError):
                    warn(f"logger {name} cannot start ({error.strerror or error}); the run continues without it")
                    continue
                raise ConfigError(
                    f"logger {name} cannot start: {in_one_line(error)}; correct what it names, or take it "
                    "from runtime.loggers"
                ) from error
            self._running.append(made)

    @property
    def has_loggers(self) -> bool:
        """Whether there are loggers other than metrics.jsonl and TensorBoard.

        These two draw no random numbers.
        """
        return any(one != TENSORBOARD for one in self._wanted)

    def write_of_update(self, record: dict[str, Any]) -> None:
        """Write a record of an update; figures of stages only every few updates.

        Staleness is the mean since the last written record.
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
        """Write one record to metrics.jsonl and to each logger."""
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

    def _each(self, call: Callable[[Any], object]) -> None:
        """Call each logger; if one fails, close it and continue without it."""
        for one in [*self._running]:
            try:
                call(one)
            except Exception as error:  # another package, or the user's own code
                reason = (error.strerror if isinstance(error, OSError) else None) or in_one_line(error)
                warn(f"logger {type(one).__name__} fails ({reason}); the run continues without it")
                self._running.remove(one)
                with contextlib.suppress(Exception):
                    one.close()

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Append a line whole or not at all."""
        try:
            if file.write(line) != len(line):
                raise OSError(0, "the disk is full")
            self._size += len(line)
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(self._size)
            if not self._is_failing:
                self._is_failing = True
                warn(f"{file.name!s} cannot be written ({error.strerror}); records are lost until it can")


def _place_of(line: bytes) -> tuple[float, bool]:
    """Return (update, whether an evaluation) of a record, as its sort key.

    An unreadable record comes after all others.
    """
    try:
        record = json.loads(line)
        return int(record["update"]), str(record["name"]).startswith("validation/")
    except (ValueError, TypeError, KeyError):
        return float("inf"), False
