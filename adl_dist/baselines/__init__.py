"""Training written with torch alone, which users would pick instead: measured in turn with our own runs."""

from adl_dist.baselines.loop import Training, joined, replicated, train_alone
from adl_dist.baselines.pipelining import train_stage

__all__ = ["Training", "joined", "replicated", "train_alone", "train_stage"]
