"""From a model to K stages: read it as a chain of units, measure them, cut it where it is best."""

from adl_dist.partition.balance import Balance, best_balance, evaluate_balance
from adl_dist.partition.chain import Chain, linearise
from adl_dist.partition.costs import Machine, StageFootprint, UnitCost
from adl_dist.partition.cut import checked_sizes, cut, even_balance, even_sizes

__all__ = [
    "Balance",
    "Chain",
    "Machine",
    "StageFootprint",
    "UnitCost",
    "best_balance",
    "checked_sizes",
    "cut",
    "evaluate_balance",
    "even_balance",
    "even_sizes",
    "linearise",
]
