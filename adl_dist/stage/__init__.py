"""One stage's mathematics: forward, delayed backward, weight versions, update. Knows no rank."""

from adl_dist.stage.spec import (
    GradientPolicy,
    LossFn,
    OptimizerFactory,
    Precision,
    TrainSpec,
    in_dtype,
    in_memory_format,
)
from adl_dist.stage.stage import Learner, Stage
from adl_dist.stage.stats import StepStats

__all__ = [
    "GradientPolicy", "Learner", "LossFn", "OptimizerFactory", "Precision", "Stage", "StepStats", "TrainSpec",
    "in_dtype", "in_memory_format",
]  # fmt: skip
