"""Accumulated Decoupled Learning: train a network as K stages that never wait for each other.

trainer = adl_dist.Trainer(model, loss_fn=..., optimizer=..., method=adl_dist.method("adl"), num_stages=4)
trainer.fit(train_dataset, epochs=10, batch_size=128, val_dataset=val_dataset, run_dir="runs/mine")
"""

from typing import TYPE_CHECKING, Any

from adl_dist.errors import AdlError
from adl_dist.schedule import Method, method

if TYPE_CHECKING:
    from adl_dist.checkpoint.policy import CheckpointPolicy
    from adl_dist.data import Loading
    from adl_dist.monitor.timeouts import WatchdogTimeouts
    from adl_dist.report.callbacks import Callback, EarlyStopping
    from adl_dist.report.comparison import compare
    from adl_dist.stage import GradientPolicy, Precision
    from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
    from adl_dist.training.trainer import Trainer

__version__ = "0.3.5"  # the one place: pyproject.toml reads it

__all__ = [
    "AdlError",
    "Callback",
    "CheckpointPolicy",
    "EarlyStopping",
    "GradientPolicy",
    "Loading",
    "Method",
    "Monitoring",
    "PartitionSpec",
    "Precision",
    "ProcessOptions",
    "Trainer",
    "WatchdogTimeouts",
    "__version__",
    "compare",
    "method",
]


def __getattr__(name: str) -> Any:
    # Late, so that schedules can be made, checked and printed without torch.
    if name == "compare":
        from adl_dist.report import comparison

        return comparison.compare
    if name in __all__:
        from adl_dist.report import callbacks
        from adl_dist.training import trainer

        return getattr(trainer if hasattr(trainer, name) else callbacks, name)
    raise AttributeError(f"module 'adl_dist' has no attribute '{name}'")
