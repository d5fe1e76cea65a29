"""The mathematics of one stage, from forward to update, without ranks."""

from adl_dist.stage.optimizer import Learner
from adl_dist.stage.spec import (
    LossFn,
    OptimizerFactory,
    Precision,
    TrainSpec,
    in_dtype,
    in_memory_format,
)
from adl_dist.stage.stage import Stage
from adl_dist.stage.stats import StepStats
from adl_dist.stage_options import GradientPolicy

__all__ = [
    "GradientPolicy", "Learner", "LossFn", "OptimizerFactory", "Precision", "Stage", "StepStats", "TrainSpec",
    "in_dtype", "in_memory_format",
]  # fmt: skip
