"""When to save, what to keep. No torch."""

from dataclasses import dataclass

from adl_dist.errors import ConfigError
from adl_dist.report.goal import Goal


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When a run saves, and which of its checkpoints it keeps.

    Attributes:
        every_epochs: save after so many epochs; 0: only at the end.
        every_updates: also save after so many updates of an epoch, with an empty pipeline, which is part of what the
            run computes; None: only between epochs.
        keep: how many of the newest to keep.
        keep_best: also keep the best one.
        best_metric: what it is the best of, like ``validation_loss``; None: the validation accuracy or, where there is
            none, the validation loss.
        best_is: the ``highest`` or the ``lowest`` of ``best_metric``; None: as known of the metric.
        background: train on while a checkpoint is being written; costs a copy of the state in host memory.

    Raises:
        ConfigError: a number is out of range.
    """

    every_epochs: int = 1
    every_updates: int | None = None
    keep: int = 2
    keep_best: bool = False
    best_metric: str | None = None
    best_is: str | None = None
    background: bool = True

    def __post_init__(self) -> None:
        _ = self.goal
        for key, value, least in (
            ("checkpoint_every_epochs", self.every_epochs, 0),
            ("checkpoint_every_updates", self.every_updates, 1),
            ("keep_checkpoints", self.keep, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"runtime.{key} must be at least {least}, got {value}")

    @property
    def goal(self) -> Goal:
        """What the best checkpoint is the best of."""
        return Goal(self.best_metric, self.best_is)

    def check_validation(self, num_validation: int) -> None:
        """Raise ConfigError if the best of no validation is to be kept."""
        if self.keep_best and not num_validation:
            raise ConfigError(
                "keep_best=True (runtime.keep_best) keeps the checkpoint with the best validation, but there is no "
                "validation dataset; give one, or omit keep_best"
            )
