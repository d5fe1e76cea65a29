"""Actions of a schedule; a list of them prints as ``L0 F0 SA0 ST0``."""

import enum
from functools import cache
from typing import NamedTuple


class Op(enum.Enum):
    """A kind of action; the value is its printed form."""

    LOAD = "L"  # stage 0: fetch input and target
    RECV_ACT = "RA"
    RECV_TARGET = "RT"
    FORWARD = "F"  # in training: builds the graph that the backward uses later
    FORWARD_ONLY = "N"  # in training without a graph: keeps the input, for RECOMPUTE
    RECOMPUTE = "R"  # replays the forward with the present weights and builds the graph
    PREDICT = "P"  # in evaluation: no graph, nothing is kept
    SEND_ACT = "SA"
    SEND_TARGET = "ST"
    RECV_GRAD = "RG"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # the backward without the gradients of most weights
    BACKWARD_WEIGHT = "WG"  # the gradients of these weights
    SEND_GRAD = "SG"
    UPDATE = "U"
    WEIGHTS = "W"  # forward from here on with the weights after so many updates of the segment
    SEND_GO = "SO"  # the forward lock: a micro-batch has reached the end of the network
    RECV_GO = "RO"
    PASS_TARGET = "PT"  # local losses: the target travels with the act, from stage to stage
    TAKE_TARGET = "TT"
    PREDICT_GRADIENT = "Q"  # synthetic gradients: a head predicts the gradient of the output
    LEARN = "H"  # the head learns from the true gradient
    UPDATE_HEAD = "HU"  # after it has learned from a whole group
    SEND_PART = "SP"  # tied weights: the gradient of one copy, of the group that ends with this micro-batch
    RECV_PART = "RP"
    SEND_SUM = "SS"  # the sum of all copies' gradients of that group
    RECV_SUM = "RS"
    UPDATE_TIED = "TU"  # the update of a copy with the sum of a group
    SEND_NORM = "SN"  # clipping: the gradient norms of this stage and those downstream, of the group that ends here
    RECV_NORM = "RN"
    SEND_TOTAL = "SM"  # the norm of the whole model's gradient of that group
    RECV_TOTAL = "RM"

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, and every action is looked up by its op


# Backwards that compute the gradient of the input: the whole one, or the first part.
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


class Tie(NamedTuple):
    """A tie: tensors that several stages hold copies of."""

    number: int  # among those of the pipeline
    stages: tuple[int, ...]  # that hold a copy, in order; the first adds up the gradients


class Action(NamedTuple):
    """One step of one stage."""

    op: Op
    number: int  # the micro-batch within the segment; for updates the group; for WEIGHTS a count of updates
    tie: Tie | None = None  # of an action on a tie
    holder: int = 0  # of an action on a tie: the stage that exchanges with the first stage of the tie

    def __str__(self) -> str:
        return f"{self.op.value}{self.number}" + (f".{self.tie.number}" if self.tie and self.tie.number else "")


class Link(NamedTuple):
    """A kind of message, with the action that receives it and its hop."""

    what: str
    recv: Op
    # Receiver minus sender. None: from stage 0 straight to the last stage, or given by the tied action.
    hop: int | None


LINKS = {
    Op.SEND_ACT: Link("act", Op.RECV_ACT, +1),
    Op.SEND_GRAD: Link("grad", Op.RECV_GRAD, -1),
    Op.SEND_TARGET: Link("target", Op.RECV_TARGET, None),
    Op.SEND_GO: Link("go", Op.RECV_GO, -1),
    Op.PASS_TARGET: Link("label", Op.TAKE_TARGET, +1),
    Op.SEND_PART: Link("tied part", Op.RECV_PART, None),
    Op.SEND_SUM: Link("tied sum", Op.RECV_SUM, None),
    Op.SEND_NORM: Link("norm", Op.RECV_NORM, -1),
    Op.SEND_TOTAL: Link("total", Op.RECV_TOTAL, +1),
}
RECEIVES = {link.recv: link for link in LINKS.values()}
CARRIES = frozenset((*LINKS, *RECEIVES))
TIED = (Op.SEND_PART, Op.SEND_SUM)  # their edges are those of the ties


class Message(NamedTuple):
    """The message of an action that sends or receives."""

    what: str  # names an edge, together with the sender
    sender: int
    receiver: int


def tied_message(op: Op, tie: Tie, holder: int) -> Message:
    """Return the message of ``op`` between the first stage and ``holder``."""
    link = LINKS[op] if op in LINKS else RECEIVES[op]
    ends = (holder, tie.stages[0]) if link.recv is Op.RECV_PART else (tie.stages[0], holder)
    number = f" ({tie.number})" if tie.number else ""
    return Message(f"{link.what} {ends[0]}>{ends[1]}{number}", *ends)


def what_of(action: Action) -> str:
    """Return the name of the edge of an ``action`` that sends or receives."""
    if action.tie is not None:
        return tied_message(action.op, action.tie, action.holder).what
    return (LINKS[action.op] if action.op in LINKS else RECEIVES[action.op]).what


def is_of_groups(what: str) -> bool:
    """Return whether an edge carries one message per group, without samples."""
    return what.startswith("tied ") or what in ("norm", "total")


def message_of(action: Action, stage: int, *, num_stages: int) -> Message | None:
    """Return the message that ``action`` sends or receives, or None."""
    if action.tie is not None:
        return tied_message(action.op, action.tie, action.holder) if action.op in CARRIES else None
    return _untied_message(action.op, stage, num_stages)


@cache  # asked for each action of a simulation, several times
def _untied_message(op: Op, stage: int, num_stages: int) -> Message | None:
    if op not in CARRIES:
        return None
    if op in LINKS:
        return Message(LINKS[op].what, stage, receiver(op, stage, num_stages=num_stages))
    return Message(RECEIVES[op].what, sender(op, stage), stage)


def receiver(op: Op, sender: int, *, num_stages: int) -> int:
    """Return the receiver of ``sender``'s message for an untied ``op``."""
    hop = LINKS[op].hop
    return num_stages - 1 if hop is None else sender + hop


def sender(op: Op, receiver: int) -> int:
    """Return the sender of ``receiver``'s message for an untied ``op``."""
    hop = RECEIVES[op].hop
    return 0 if hop is None else receiver - hop
