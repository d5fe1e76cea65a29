"""The way from a model to K stages: recording, measuring and cutting."""

from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Machine, UnitCost
from adl_dist.partition.cut import checked_sizes, even_sizes, flops_sizes
from adl_dist.partition.stage_module import StageModule

__all__ = [
    "Chain",
    "Machine",
    "StageModule",
    "UnitCost",
    "checked_sizes",
    "even_sizes",
    "flops_sizes",
]
