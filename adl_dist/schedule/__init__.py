"""What every stage does, in which order. Pure integers: no tensors, no ranks, no clock, no torch."""

from adl_dist.schedule.actions import Action, Op, format_stream, parse_stream
from adl_dist.schedule.methods import METHODS, Method, method
from adl_dist.schedule.replay import check_rendezvous, in_turn, replay
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.streams import (
    evaluation_stream,
    staleness,
    steady_staleness,
    training_stream,
)
from adl_dist.schedule.table import describe

__all__ = [
    "METHODS",
    "Action",
    "Method",
    "Op",
    "Segment",
    "check_rendezvous",
    "describe",
    "evaluation_stream",
    "format_stream",
    "in_turn",
    "method",
    "parse_stream",
    "replay",
    "staleness",
    "steady_staleness",
    "training_stream",
]
