"""Schedules: the ordered actions of every stage, in pure integers."""

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.interleaving import interleave
from adl_dist.schedule.method_table import METHODS
from adl_dist.schedule.methods import Method, method
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.run_plan import Segment
from adl_dist.schedule.send_limits import max_pending_of
from adl_dist.schedule.table import describe, figures
from adl_dist.schedule.timing import Costs, actions_of_all, simulate, speed
from adl_dist.schedule.work import StageWork, evaluation_work, shorten, training_work, updates_that_load

__all__ = [
    "METHODS", "Action", "Costs", "Method", "Op", "Pipeline", "Segment", "StageWork", "actions_of_all", "describe",
    "evaluation_work", "figures", "interleave", "max_pending_of", "method", "shorten", "simulate", "speed",
    "training_work", "updates_that_load",
]  # fmt: skip
