"""What every stage does, in which order. Pure integers: no tensors, no ranks, no clock, no torch."""

from adl_dist.schedule.actions import Action, Op, format_stream, parse_stream
from adl_dist.schedule.actions_of import (
    evaluation_stream,
    forward_version,
    staleness,
    steady_staleness,
    training_stream,
)
from adl_dist.schedule.greedy import greedy_streams
from adl_dist.schedule.method_table import METHODS, Row
from adl_dist.schedule.methods import Method, method
from adl_dist.schedule.replay import check_rendezvous, in_turn, most_under_way, replay
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.table import StageFigures, describe, figures
from adl_dist.schedule.timing import Costs, simulate, speed, streams_of
from adl_dist.schedule.training import (
    Work,
    end_early,
    evaluation_work,
    forget_streams,
    leaves_no_trace,
    max_pending_of,
    training_work,
    updates_that_load,
)

__all__ = [
    "METHODS",
    "Action",
    "Costs",
    "Method",
    "Op",
    "Row",
    "Segment",
    "StageFigures",
    "Work",
    "check_rendezvous",
    "describe",
    "end_early",
    "evaluation_stream",
    "evaluation_work",
    "figures",
    "forget_streams",
    "format_stream",
    "forward_version",
    "greedy_streams",
    "in_turn",
    "leaves_no_trace",
    "max_pending_of",
    "method",
    "most_under_way",
    "parse_stream",
    "replay",
    "simulate",
    "speed",
    "staleness",
    "steady_staleness",
    "streams_of",
    "training_stream",
    "training_work",
    "updates_that_load",
]
