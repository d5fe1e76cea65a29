"""The metric that decides which weights are best."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from adl_dist.errors import ConfigError, did_you_mean

Mode = Literal["max", "min"]
HIGHEST: Mode = "max"
LOWEST: Mode = "min"
# Known metrics, with the end at which they are best.
TOP5 = "validation_top5"
KNOWN = {
    **{"validation_accuracy": HIGHEST, TOP5: HIGHEST},
    **{"validation_loss": LOWEST, "validation_perplexity": LOWEST},
}


def falls(metric: str) -> bool:
    """Return whether ``metric`` is best at its minimum."""
    return metric.endswith(("loss", "perplexity"))


@dataclass(frozen=True)
class Goal:
    """The ``metric`` of a summary that is best at its ``max`` or ``min``.

    Without a ``metric`` the validation accuracy decides or, if none is measured, the validation loss. Known metrics
    have a default for ``best``.

    Raises:
        ConfigError: If it is not known whether the metric is best at its maximum.
    """

    metric: str | None = None
    best: Mode | None = None

    def __post_init__(self) -> None:
        if self.best not in (None, HIGHEST, LOWEST):
            raise ConfigError(f"best_mode={self.best!r}: expected {HIGHEST} or {LOWEST}")
        if self.metric is None and self.best is not None:
            raise ConfigError(
                f"best_mode={self.best} says which way a metric is better, but there is none; give best_metric "
                "(runtime.best_metric) as well"
            )
        if self.metric is not None and self.best is None and self.metric not in KNOWN:
            raise ConfigError(
                f"metric {self.metric}: it is not known which way it is better{did_you_mean(self.metric, KNOWN)}; "
                f"give {HIGHEST} or {LOWEST} as best_mode, and the name as in metrics.jsonl, like validation_loss"
            )

    def check(self, own: Collection[str]) -> None:
        """Raise ConfigError if the metric is not measured.

        ``own`` are the metrics measured in addition to loss and accuracy.
        """
        basic = "validation_loss", "validation_accuracy"
        measured = list(dict.fromkeys([*basic, *(f"validation_{name}" for name in own)]))
        if self.metric == TOP5 and TOP5 not in measured:
            raise ConfigError(f"{TOP5} is measured if train.metrics has top5 (Trainer(metrics=['top5'])); it has not")
        if self.metric is not None and self.metric not in (*KNOWN, *measured):
            whole = f"validation_{self.metric}"
            hint = f"; did you mean '{whole}'?" if whole in measured else did_you_mean(self.metric, measured)
            raise ConfigError(f"there is no metric '{self.metric}'{hint}; there are {', '.join(measured)}")

    def score(self, metrics: Mapping[str, float]) -> tuple[float, ...] | None:
        """Return a tuple, larger for better ``metrics``; None without the metric."""
        if (self.metric or "validation_loss") not in metrics:
            return None
        if self.metric is None:
            loss = -metrics["validation_loss"]
            loss = -math.inf if math.isnan(loss) else loss
            return (metrics["validation_accuracy"], loss) if "validation_accuracy" in metrics else (loss,)
        value = metrics[self.metric]
        if math.isnan(value):  # NaN compares with nothing
            return (-math.inf,)
        return (value if (self.best or KNOWN[self.metric]) == HIGHEST else -value,)

    def value(self, metrics: Mapping[str, float]) -> str:
        """Return the deciding metric and its value as text."""
        names = [self.metric] if self.metric else ["validation_accuracy", "validation_loss"]
        name = next(name for name in names if name in metrics)
        return f"{name} {metrics[name]:.4g}"
