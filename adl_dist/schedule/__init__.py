"""What every stage does, in which order. Pure integers: no tensors, no ranks, no clock, no torch."""

from adl_dist.schedule.actions import Action, Op, format_stream, parse_stream
from adl_dist.schedule.actions_of import (
    evaluation_actions,
    forward_version,
    staleness,
    steady_staleness,
    training_actions,
)
from adl_dist.schedule.greedy import greedy_streams
from adl_dist.schedule.method_table import METHODS, MethodSpec
from adl_dist.schedule.methods import Method, method
from adl_dist.schedule.replay import check_rendezvous, downstream_first, max_outstanding, replay
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.table import StageFigures, describe, figures
from adl_dist.schedule.timing import Costs, actions_of_all, simulate, speed
from adl_dist.schedule.training import (
    StageWork,
    drain_is_exact,
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
    "Segment",
    "StageFigures",
    "StageWork",
    "actions_of_all",
    "check_rendezvous",
    "describe",
    "downstream_first",
    "drain_is_exact",
    "evaluation_actions",
    "evaluation_work",
    "figures",
    "forget_actions",
    "format_stream",
    "forward_version",
    "greedy_streams",
    "max_outstanding",
    "max_pending_of",
    "method",
    "parse_stream",
    "replay",
    "shorten",
    "simulate",
    "speed",
    "staleness",
    "steady_staleness",
    "training_actions",
    "training_work",
    "updates_that_load",
]
