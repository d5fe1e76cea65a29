"""Optimizers that bear stale gradients: a rule for the matrices of a model, AdamW or SGD for the rest."""

from adl_dist.optimizers.muon import Muon
from adl_dist.optimizers.roles import mark_roles, take_role
from adl_dist.optimizers.rotated import RotatedAdam

__all__ = ["Muon", "RotatedAdam", "mark_roles", "take_role"]
