"""Plain loops written with torch alone, which users would pick instead: measured in turn with our own runs."""

from adl_dist.baselines.ddp import train_replica
from adl_dist.baselines.loop import Clock, Updates, train_alone
from adl_dist.baselines.pipelining import train_stage
from adl_dist.baselines.ranks import joined

__all__ = ["Clock", "Updates", "joined", "train_alone", "train_replica", "train_stage"]
