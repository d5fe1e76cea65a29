"""The times of saving and the checkpoints that stay. No torch."""

from dataclasses import InitVar, dataclass

from adl_dist.report.goal import Goal, Mode
from adl_dist.settings import check_settings, documented, from_old_name, setting


@documented("runtime")
@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """The schedule of saving and the number of checkpoints kept.

    Raises:
        ConfigError: If a value is out of range.
    """

    every_epochs: int = setting(
        1, "save after so many epochs; 0: only at the end", key="checkpoint_every_epochs", least=0
    )
    every_updates: int | None = setting(
        None,
        "also save after so many updates of an epoch, with an empty pipeline; docs/runs.md",
        key="checkpoint_every_updates",
        least=1,
    )
    every_minutes: float | None = setting(
        None,
        "also save after so many minutes, where the pipeline is empty anyway: no value changes",
        key="checkpoint_every_minutes",
        above=0,
    )
    keep: int = setting(2, "newest checkpoints to keep in run_dir/checkpoints", key="keep_checkpoints", least=1)
    keep_best: bool = setting(False, "also keep the best checkpoint")
    best_metric: str | None = setting(
        None,
        "metric of the best checkpoint, like validation_loss; null: accuracy or, without classes or with an own loss "
        "and no metric accuracy, the loss",
    )
    best_mode: Mode | None = setting(None, "is best_metric best at its max | min; null: known of a few metrics")
    background: bool = setting(
        True, "train on while a checkpoint is written; false: no copy of the state in host memory", key="async_save"
    )

    best_is: InitVar[str | None] = None  # the name of best_mode until 0.5.0

    def __post_init__(self, best_is: str | None) -> None:
        if best_is is not None:
            object.__setattr__(self, "best_mode", from_old_name("runtime.best_is", best_is, stacklevel=3))
        check_settings(self, "runtime")
        _ = self.goal

    @property
    def goal(self) -> Goal:
        """The metric of the best checkpoint, and whether its max or min is best."""
        return Goal(self.best_metric, self.best_mode)
