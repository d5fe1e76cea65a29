"""Learning rate schedules, and the optimizers that bear stale gradients."""

from adl_dist.optim.muon import Muon
from adl_dist.optim.roles import mark_roles
from adl_dist.optim.rotated import RotatedAdam
from adl_dist.optim.schedule import (
    build_lr_schedule,
    constant,
    cosine,
    cosine_factor,
    fast_forward,
    multistep,
    multistep_factor,
    takes_length,
    try_schedule,
    warmup_factor,
)

__all__ = [
    "Muon", "RotatedAdam", "build_lr_schedule", "constant", "cosine", "cosine_factor", "fast_forward",
    "mark_roles", "multistep", "multistep_factor", "takes_length", "try_schedule", "warmup_factor",
]  # fmt: skip
