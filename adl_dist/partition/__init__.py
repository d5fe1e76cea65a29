"""From a model to K stages: read it as a chain of units, measure them, cut it where it is best."""

from adl_dist.partition.chain import Chain, check_same_chain, linearise
from adl_dist.partition.costs import Machine, UnitCost
from adl_dist.partition.cut import checked_sizes, cut, even_balance, even_sizes

__all__ = [
    "Chain", "Machine", "UnitCost", "check_same_chain", "checked_sizes", "cut", "even_balance", "even_sizes",
    "linearise",
]  # fmt: skip
