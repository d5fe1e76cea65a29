"""The words of a schedule: a stage's life is a list of actions, which print as ``L0 F0 SA0 ST0``."""

import enum
from typing import NamedTuple


class Op(enum.Enum):
    """A kind of action; the value is its printed form."""

    LOAD = "L"  # stage 0: fetch input and target
    RECV_ACT = "RA"
    RECV_TARGET = "RT"
    FORWARD = "F"  # in training: builds the graph that the backward uses later
    FORWARD_ONLY = "N"  # in training without a graph: keeps what came in, for RECOMPUTE
    RECOMPUTE = "R"  # replays the forward with the present weights and builds the graph
    PREDICT = "P"  # in evaluation: no graph, nothing kept
    SEND_ACT = "SA"
    SEND_TARGET = "ST"
    RECV_GRAD = "RG"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # the backward without the gradients of most weights: what goes upstream, and the rest
    BACKWARD_WEIGHT = "WG"  # these gradients, of the same micro-batch
    SEND_GRAD = "SG"
    UPDATE = "U"
    WEIGHTS = "W"  # forward from here on with the weights after so many updates of the segment
    SEND_GO = "SO"  # the forward lock: a micro-batch has reached the end of the network
    RECV_GO = "RO"
    PASS_TARGET = "PT"  # local losses: the target travels with the act, from stage to stage
    TAKE_TARGET = "TT"
    KEEP = "K"  # replay buffer: put away what has just arrived
    PICK = "G"  # take it out again, to be worked on; it stays in the buffer
    DROP = "D"  # make room in the buffer
    PREDICT_GRADIENT = "Q"  # synthetic gradients: a head says what gradient will come back for the output
    LEARN = "H"  # the head learns from the gradient that has come back
    UPDATE_HEAD = "HU"  # when it has learned from a whole group

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, and every action is looked up by its op


# A backward that makes what goes upstream and ends the life of the graph: the whole one, or the first part of it.
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


class Action(NamedTuple):
    """One step of one stage."""

    op: Op
    number: int  # the micro-batch within the segment; for updates the group; for WEIGHTS a count of updates

    def __str__(self) -> str:
        return f"{self.op.value}{self.number}"


class Link(NamedTuple):
    """One kind of message: who sends it, who receives it."""

    what: str
    recv: Op
    hop: int | None  # receiver minus sender; None: from stage 0 straight to the last stage


LINKS = {
    Op.SEND_ACT: Link("act", Op.RECV_ACT, +1),
    Op.SEND_GRAD: Link("grad", Op.RECV_GRAD, -1),
    Op.SEND_TARGET: Link("target", Op.RECV_TARGET, None),
    Op.SEND_GO: Link("go", Op.RECV_GO, -1),
    Op.PASS_TARGET: Link("label", Op.TAKE_TARGET, +1),
}
RECEIVES = {link.recv: link for link in LINKS.values()}


def receiver(op: Op, sender: int, *, num_stages: int) -> int:
    """Return the stage that receives what ``sender`` sends with ``op``."""
    hop = LINKS[op].hop
    return num_stages - 1 if hop is None else sender + hop


def sender(op: Op, receiver: int) -> int:
    """Return the stage that sends what ``receiver`` receives with ``op``."""
    hop = RECEIVES[op].hop
    return 0 if hop is None else receiver - hop
