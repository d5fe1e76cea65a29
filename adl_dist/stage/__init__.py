"""One stage's mathematics: forward, delayed backward, weight versions, update. Knows no rank."""

from adl_dist.stage.calls import packed, takes_gradient, unpacked
from adl_dist.stage.heads import NORMALISES_SAMPLES, build_head, check_outs
from adl_dist.stage.spec import GradientPolicy, LossFn, OptimizerFactory, Precision, TrainSpec, to_channels_last
from adl_dist.stage.stage import Stage
from adl_dist.stage.stats import StepStats

__all__ = [
    "NORMALISES_SAMPLES",
    "GradientPolicy",
    "LossFn",
    "OptimizerFactory",
    "Precision",
    "Stage",
    "StepStats",
    "TrainSpec",
    "build_head",
    "check_outs",
    "packed",
    "takes_gradient",
    "to_channels_last",
    "unpacked",
]
