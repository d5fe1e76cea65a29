"""What every stage does, in which order. Pure integers: no tensors, no ranks, no clock, no torch."""

from adl_dist.schedule.actions import Action, Op, format_actions, parse_actions
from adl_dist.schedule.build_actions import evaluation_actions, training_actions
from adl_dist.schedule.greedy import greedy_actions
from adl_dist.schedule.method_table import METHODS, MethodSpec
from adl_dist.schedule.methods import Method, method
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.replay import check_rendezvous, downstream_first, max_outstanding, replay
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.table import StageFigures, describe, figures
from adl_dist.schedule.timing import Costs, actions_of_all, simulate, speed
from adl_dist.schedule.work import (
    StageWork,
    evaluation_work,
    forget_actions,
    max_pending_of,
    shorten,
    training_work,
    updates_that_load,
)

__all__ = [
    "METHODS",
    "Action",
    "Costs",
    "Method",
    "MethodSpec",
    "Op",
    "Pipeline",
    "Segment",
    "StageFigures",
    "StageWork",
    "actions_of_all",
    "check_rendezvous",
    "describe",
    "downstream_first",
    "evaluation_actions",
    "evaluation_work",
    "figures",
    "forget_actions",
    "format_actions",
    "greedy_actions",
    "max_outstanding",
    "max_pending_of",
    "method",
    "parse_actions",
    "replay",
    "shorten",
    "simulate",
    "speed",
    "training_actions",
    "training_work",
    "updates_that_load",
]
