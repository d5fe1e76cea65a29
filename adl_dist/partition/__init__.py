"""From a model to K stages."""

from adl_dist.partition.cut import cut, even_balance, units_of

__all__ = ["cut", "even_balance", "units_of"]
