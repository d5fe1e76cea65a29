"""Carries out a schedule: for each action, do it. The only loop, and it holds no policy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from adl_dist.schedule import Action, Op
from adl_dist.stage import Stage
from adl_dist.transport import Receiver, Sender

Tensors = tuple[Tensor, ...]


@dataclass
class Seat:
    """A stage with all that it touches during one segment.

    Attributes:
        stage: does the mathematics.
        receivers: by what arrives, ``act``, ``grad`` or ``target``.
        senders: by what leaves.
        batches: (input, target) of each micro-batch in order; on stage 0 only.
        loss_grads: the weight of each micro-batch in its group; on the last stage only.
        held: what one action leaves for the next, by what it is.
    """

    stage: Stage
    receivers: Mapping[str, Receiver] = field(default_factory=dict)
    senders: Mapping[str, Sender] = field(default_factory=dict)
    batches: Iterator[tuple[Tensor, Tensor]] | None = None
    loss_grads: Sequence[Tensor] = ()
    held: dict[str, Tensors] = field(default_factory=dict)

    def open(self, sizes: Sequence[int]) -> None:
        """Begin a segment whose micro-batches hold ``sizes`` samples."""
        for sender in self.senders.values():
            sender.open(sizes)
        for receiver in self.receivers.values():
            receiver.open(sizes)

    def drain(self) -> None:
        """Return when everything sent has left."""
        for sender in self.senders.values():
            sender.drain()


def run(order: Iterable[tuple[int, Action]], seats: Mapping[int, Seat]) -> None:
    """Execute (stage, action) in the order given: one stream, or a replay of several."""
    for stage, action in order:
        step(action, seats[stage])


def step(action: Action, seat: Seat) -> None:
    """Execute one action."""
    b, held = action.number, seat.held
    match action.op:
        case Op.LOAD:
            assert seat.batches is not None
            input_, target = next(seat.batches)
            held["act"], held["target"] = (input_,), (target,)
        case Op.RECV_ACT:
            held["act"] = seat.receivers["act"].recv(b)
        case Op.RECV_TARGET:
            held["target"] = seat.receivers["target"].recv(b)
        case Op.FORWARD:
            held["out"] = seat.stage.forward(b, held.pop("act"), _target(seat))
        case Op.PREDICT:
            held["out"] = seat.stage.predict(held.pop("act"), _target(seat))
        case Op.SEND_ACT:
            seat.senders["act"].send(b, held.pop("out"))
        case Op.SEND_TARGET:
            seat.senders["target"].send(b, held.pop("target"))
        case Op.RECV_GRAD:
            held["grad"] = seat.receivers["grad"].recv(b)
        case Op.BACKWARD:
            # The loss is the last stage's output, and its gradient is its weight in the group.
            grads = (seat.loss_grads[b],) if seat.stage.is_last else held.pop("grad")
            held["grad"] = seat.stage.backward(b, grads)
        case Op.SEND_GRAD:
            seat.senders["grad"].send(b, held.pop("grad"))
        case Op.UPDATE:
            seat.stage.update()


def _target(seat: Seat) -> Tensor | None:
    return seat.held.pop("target")[0] if seat.stage.is_last else None
