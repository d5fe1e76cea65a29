"""Loggers: TensorBoard, MLflow, Weights & Biases, or the user's own.

Only rank 0 calls them. Packages find an address, a key or the name of an experiment in their usual environment
variables.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from adl_dist.errors import ConfigError

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
        """Take one line of metrics.jsonl."""

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
    """Curves in ``folder/tensorboard``."""

    def start(self, folder: Path, settings: Mapping[str, Any], from_update: int) -> None:
        """Open a file; it hides older values from ``from_update`` on."""
        from torch.utils.tensorboard import SummaryWriter  # imported late: it costs a second

        self._board: SummaryWriter = SummaryWriter(str(folder / "tensorboard"), purge_step=from_update)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one value to TensorBoard."""
        self._board.add_scalar(tag_of(record), record["value"], record["update"])

    def flush(self) -> None:
        """Write the file."""
        self._board.flush()

    def close(self) -> None:
        """Close the file."""
        self._board.close()


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
        run_id = kept.read_text() if from_update > 0 and kept.is_file() else None
        project = os.environ.get("WANDB_PROJECT", EXPERIMENT)
        more = {"id": run_id, "resume": "allow"} if run_id is not None else {}
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings), **more)
        # Records of stages come in any order, so each has its own update.
        self._run.define_metric("*", step_metric="update")
        kept.write_text(self._run.id)

    def write(self, record: Mapping[str, Any]) -> None:
        """Log one value."""
        self._run.log({tag_of(record): record["value"], "update": record["update"]})

    def flush(self) -> None:
        """Do nothing: wandb's own process sends the values."""

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
    """Raise ConfigError if a logger is unknown, missing or incomplete."""
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
