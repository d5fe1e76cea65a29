"""Where records go besides metrics.jsonl: TensorBoard, MLflow, Weights & Biases, or a logger of the user's own.

A logger has four methods, of which rank 0 alone calls any. What its package needs to know (an address, a key, the name
of an experiment) it finds where that package always looks for it, in the environment.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.warning import warn

EXPERIMENT = "adl_dist"
MOST_PENDING = 500  # records that MLflow is sent at once; it takes 1000 at most
LONGEST_PARAM, MOST_PARAMS = 500, 100  # of MLflow: characters of a value, values sent at once


@runtime_checkable
class Logger(Protocol):
    """Takes the records of a run. An exception of ``start`` ends the run, one of another method only the logging."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Begin a run with ``settings``, by dotted names, or continue: records from ``from_update`` on come again."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record, a line of metrics.jsonl."""

    def flush(self) -> None:
        """Send on what has been taken."""

    def close(self) -> None:
        """End, in order or not."""


def tag_of(record: Mapping[str, Any]) -> str:
    """Return the name of a curve: that of the record, and of the stage or process where it is of one."""
    for kind, number in (("stage/", "stage"), ("process/", "rank")):
        if record["name"].startswith(kind):
            return f"{record['name']}/{record[number]}"
    return str(record["name"])


class TensorBoard:
    """Curves in ``folder/tensorboard``."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Open a file; curves are cut off at ``from_update``."""
        from torch.utils.tensorboard import SummaryWriter  # imported late: it costs a second

        self._board: SummaryWriter = SummaryWriter(str(folder / "tensorboard"), purge_step=from_update)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand over one value; an error of the thread that writes is raised at the next call."""
        self._board.add_scalar(tag_of(record), record["value"], record["update"])

    def flush(self) -> None:
        """Have the file hold all."""
        self._board.flush()

    def close(self) -> None:
        """Close the file."""
        self._board.close()


class MLflow:
    """A run of MLflow, found again by ``folder/mlflow-run``, in the experiment MLFLOW_EXPERIMENT_NAME or adl_dist."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Continue the run that the folder names, or create one with the settings as its parameters."""
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
        """Keep one value, to be sent with others."""
        milliseconds = int(time.time() * 1000)
        self._pending.append(self._metric(tag_of(record), float(record["value"]), milliseconds, record["update"]))
        if len(self._pending) >= MOST_PENDING:
            self.flush()

    def flush(self) -> None:
        """Send what is kept."""
        pending, self._pending = self._pending, []
        if pending:
            self._client.log_batch(self._run_id, metrics=pending)

    def close(self) -> None:
        """Send what is kept, and end the run."""
        self.flush()
        self._client.set_terminated(self._run_id)


class WandB:
    """A run of Weights & Biases, found again by ``folder/wandb-run``, in the project WANDB_PROJECT or adl_dist."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Begin a run, or continue the one that the folder names."""
        import wandb

        kept = folder / "wandb-run"
        run_id = kept.read_text() if from_update > 0 and kept.is_file() else None
        project = os.environ.get("WANDB_PROJECT", EXPERIMENT)
        more = {"id": run_id, "resume": "allow"} if run_id is not None else {}
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings), **more)
        # Stages report when they get there, so records are in no order: each brings its own place.
        self._run.define_metric("*", step_metric="update")
        kept.write_text(self._run.id)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand over one value."""
        self._run.log({tag_of(record): record["value"], "update": record["update"]})

    def flush(self) -> None:
        """Do nothing: its own process sends all."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


TENSORBOARD = "tensorboard"
LOGGERS: dict[str, tuple[Callable[[], Logger], str]] = {  # by name, with the package that it needs
    TENSORBOARD: (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


def check_loggers(loggers: Sequence[Any]) -> None:
    """Raise ConfigError for one that there is not, whose package is not installed, or that lacks a method."""
    for one in loggers:
        if isinstance(one, str):
            if one not in LOGGERS:
                raise ConfigError(
                    f"runtime.loggers: there is no '{one}'; choose of {', '.join(LOGGERS)}, or give your own"
                )
            if importlib.util.find_spec(LOGGERS[one][1]) is None:
                raise ConfigError(f"runtime.loggers: {one} is not installed here: pip install {LOGGERS[one][1]}")
        elif isinstance(one, type) or not isinstance(one, Logger):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise ConfigError(f"runtime.loggers: expected an object with start, write, flush and close, got {kind}")


@dataclass
class Loggers:
    """The loggers of a run; one that fails is given up with a warning, and the run continues without it."""

    wanted: Sequence[Any] = ()  # names and loggers
    _running: list[tuple[str, Logger]] = field(default_factory=list)

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Start all; OSError of TensorBoard's disk is a warning, any other failure a ConfigError."""
        for one in self.wanted:
            made: Logger = LOGGERS[one][0]() if isinstance(one, str) else one
            name = type(made).__name__
            try:
                made.start(folder, settings, from_update)
            except Exception as error:  # another package, or the user's own code
                if isinstance(made, TensorBoard) and isinstance(error, OSError):
                    warn(f"logger {name} cannot start ({error.strerror or error}); the run continues without it")
                    continue
                raise ConfigError(
                    f"logger {name} cannot start: {in_one_line(error)}; correct what it names, or take it "
                    "from runtime.loggers"
                ) from error
            self._running.append((name, made))

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a record to all."""
        for name, one in self._running:
            with self._given_up(name, one):
                one.write(record)

    def flush(self) -> None:
        """Have all send on what they have."""
        for name, one in self._running:
            with self._given_up(name, one):
                one.flush()

    def close(self) -> None:
        """End all."""
        running, self._running = self._running, []
        for name, one in running:
            with self._given_up(name, one):
                one.close()

    @contextlib.contextmanager
    def _given_up(self, name: str, one: Logger) -> Iterator[None]:
        """Give a logger up, with a warning, if it fails inside."""
        try:
            yield
        except Exception as error:  # another package, or the user's own code: no reason to lose a run
            said = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            warn(f"logger {name} fails ({' '.join(str(said).split())}); the run continues without it")
            if (name, one) in self._running:
                self._running = [pair for pair in self._running if pair[1] is not one]
                with contextlib.suppress(Exception):
                    one.close()
