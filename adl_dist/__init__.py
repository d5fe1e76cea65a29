"""Accumulated Decoupled Learning: training as K stages that never wait.

trainer = adl_dist.Trainer(model, loss_fn=..., optimizer=..., method=adl_dist.method("adl"), num_stages=4)
trainer.fit(train_dataset, epochs=10, batch_size=128, val_dataset=val_dataset, run_dir="runs/mine")
"""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

from adl_dist.errors import (
    AdlError,
    CallbackError,
    ChannelError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    PartitionError,
    SaveError,
    StageFailed,
    TakenOverError,
)
from adl_dist.schedule import Method, method

if TYPE_CHECKING:
    from adl_dist.checkpoint.policy import CheckpointPolicy
    from adl_dist.data import Loading
    from adl_dist.monitor.timeouts import WatchdogTimeouts
    from adl_dist.report.callbacks import Callback, EarlyStopping, TrainerState
    from adl_dist.report.comparison import compare
    from adl_dist.stage import GradientPolicy, Precision
    from adl_dist.stage.metrics import EpochMetric
    from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
    from adl_dist.training.text_samples import TextSamples
    from adl_dist.training.trainer import Trainer

logging.getLogger("adl_dist").addHandler(logging.NullHandler())  # what the user must see is printed besides

__version__ = "0.4.0"  # the one place: pyproject.toml reads it

__all__ = [
    "AdlError",
    "Callback",
    "CallbackError",
    "ChannelError",
    "CheckpointError",
    "CheckpointPolicy",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "EpochMetric",
    "GradientPolicy",
    "Loading",
    "Method",
    "Monitoring",
    "PartitionError",
    "PartitionSpec",
    "Precision",
    "ProcessOptions",
    "SaveError",
    "StageFailed",
    "TakenOverError",
    "TextSamples",
    "Trainer",
    "TrainerState",
    "WatchdogTimeouts",
    "__version__",
    "compare",
    "method",
]

# Where names are that are imported late, so that schedules can be made, checked and printed without torch.
_LATE = {
    "CheckpointPolicy": "checkpoint.policy",
    "Loading": "data",
    "WatchdogTimeouts": "monitor.timeouts",
    **dict.fromkeys(("Callback", "EarlyStopping", "TrainerState"), "report.callbacks"),
    "compare": "report.comparison",
    **dict.fromkeys(("GradientPolicy", "Precision"), "stage"),
    "EpochMetric": "stage.metrics",
    **dict.fromkeys(("Monitoring", "PartitionSpec", "ProcessOptions"), "training.options"),
    "TextSamples": "training.text_samples",
    "Trainer": "training.trainer",
}
_MODULES = ("data", "losses", "models", "optim", "optimizers")  # that the docs name


def __getattr__(name: str) -> Any:
    if name == "Moment":
        warnings.warn("adl_dist.Moment is adl_dist.TrainerState since 0.4", DeprecationWarning, stacklevel=2)
        name = "TrainerState"
    if name in _MODULES:
        return importlib.import_module(f"adl_dist.{name}")
    if name not in _LATE:
        raise AttributeError(f"module 'adl_dist' has no attribute '{name}'")
    return getattr(importlib.import_module(f"adl_dist.{_LATE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_MODULES})
