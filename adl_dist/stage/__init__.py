"""One stage's mathematics: forward, delayed backward, weight versions, update. Knows no rank."""

from adl_dist.stage.spec import (
    LossFn,
    OptimizerFactory,
    Precision,
    TrainSpec,
    in_dtype,
    in_memory_format,
)
from adl_dist.stage.stage import Learner, Stage
from adl_dist.stage.stats import StepStats
from adl_dist.stage_options import GradientPolicy

__all__ = [
    "GradientPolicy", "Learner", "LossFn", "OptimizerFactory", "Precision", "Stage", "StepStats", "TrainSpec",
    "in_dtype", "in_memory_format",
]  # fmt: skip
