"""Learning rates as functions of the update index."""

from adl_dist.optim.schedules import build_lr_schedule, constant, cosine, fast_forward, multistep

__all__ = ["build_lr_schedule", "constant", "cosine", "fast_forward", "multistep"]
