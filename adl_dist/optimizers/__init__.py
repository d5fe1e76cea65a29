"""Optimizers that tolerate stale gradients, and rules for groups."""

from adl_dist.optimizers.muon import Muon
from adl_dist.optimizers.roles import mark_roles, take_role
from adl_dist.optimizers.rules import prepare, with_rules

__all__ = ["Muon", "mark_roles", "prepare", "take_role", "with_rules"]
