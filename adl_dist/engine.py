"""The loop that carries out a schedule, action by action, without policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from adl_dist.batch import Tensors
from adl_dist.schedule import Action, Op, StageWork
from adl_dist.schedule.actions import LINKS, RECEIVES, is_of_groups, what_of
from adl_dist.stage import Stage
from adl_dist.stage.heads import GradientHead
from adl_dist.transport.process import ProcessReceiver, ProcessSender
from adl_dist.transport.wire import LocalChannel

NO_TARGET = (None,)  # where there is no loss
# The names of messages among the tensors that a stage holds.
HELD = {
    **{Op.SEND_ACT: "out", Op.SEND_GRAD: "grad", Op.SEND_TARGET: "target", Op.PASS_TARGET: "target"},
    **{Op.RECV_ACT: "act", Op.RECV_GRAD: "grad", Op.RECV_TARGET: "target", Op.TAKE_TARGET: "target"},
}


@dataclass
class StageContext:
    """A stage with its channels, actions and tensors during one segment."""

    stage: Stage  # the mathematics
    receivers: dict[str, LocalChannel | ProcessReceiver] = field(default_factory=dict)  # by kind; see ``LINKS``
    senders: dict[str, LocalChannel | ProcessSender] = field(default_factory=dict)
    work: StageWork = field(default_factory=lambda: StageWork([], [], []))  # of this segment
    last_of_groups: frozenset[int] = frozenset()  # micro-batches whose backward completes the gradients of a group
    # On stage 0 only: the tensors of each micro-batch: its input, of which there are ``num_inputs``, its target, and
    # its counts, if the loss counts its terms.
    batches: Iterator[tuple[Tensor, ...]] | None = None
    num_inputs: int = 1
    # Where there is a loss: the weight of each micro-batch in its group, unless that comes with its target.
    loss_grads: Sequence[Tensor] = ()
    held: dict[str, Tensors] = field(default_factory=dict)  # what one action leaves for the next, by kind

    def open(self, work: StageWork, *, training: bool) -> None:
        """Open all channels for a segment of training or of evaluation."""
        self.work = work
        self.last_of_groups = work.last_of_groups()  # now, because a stop may shorten the list later on
        self.held.clear()
        whole = [1] * len(work.sizes)  # messages of groups have no batch dimension of their own
        for kind, sender in self.senders.items():
            sender.open(whole if is_of_groups(kind) else work.sizes, training=training)
        for kind, receiver in self.receivers.items():
            order = [a.number for a in work.actions if a.op in RECEIVES and what_of(a) == kind]
            receiver.open(whole if is_of_groups(kind) else work.sizes, order, training=training)

    def shorten(self, num_micro_batches: int) -> None:
        """Expect only the first ``num_micro_batches`` from other stages."""
        for receiver in self.receivers.values():
            receiver.shorten(num_micro_batches)

    def drain(self) -> None:
        """Wait until all sent messages have left."""
        for sender in self.senders.values():
            sender.drain()


def run(
    order: Iterable[tuple[int, Action]],
    contexts: Mapping[int, StageContext],
    log: Any = None,
    on_update: Callable[[int, int], None] | None = None,
) -> None:
    """Execute pairs (stage, action) of one or more stages in this ``order``.

    If a torch profiler runs when this begins, each action is a range in its timeline, next to the work of a GPU.
    ``contexts`` are the stages by index, opened for the segment. ``log`` is an
    :class:`adl_dist.monitor.activity.ActivityLog`. ``on_update`` is called with (stage, group) after each update,
    before the next action.
    """
    begin, end = (log.begin, log.end) if log is not None else (lambda stage, action: None, lambda: None)
    carry_out = _profiled_step if _profiler_enabled() else step
    for stage, action in order:
        begin(stage, action)
        carry_out(action, contexts[stage])
        end()
        if on_update is not None and action.op is Op.UPDATE:
            on_update(stage, action.number)


def step(action: Action, context: StageContext) -> None:
    """Execute one action of one stage."""
    b, stage, held = action.number, context.stage, context.held
    match action.op:  # compared one after the other, so what every method does comes first
        case Op.FORWARD | Op.FORWARD_ONLY:
            wanted = held["target"] if stage.has_loss else NO_TARGET
            held["out"] = stage.forward(b, held.pop("act"), *wanted, keep_graph=action.op is Op.FORWARD)
        case Op.BACKWARD:
            # The gradient of a loss is its weight in the group.
            grads = (context.loss_grads[b],) if stage.has_loss else held.pop("grad")
            held["grad"] = stage.backward(b, grads)
            if b in context.last_of_groups:
                held["grad"] = stage.finish_group(grads, held["grad"])
        case Op.SEND_ACT | Op.SEND_GRAD | Op.SEND_TARGET | Op.PASS_TARGET:
            context.senders[LINKS[action.op].what].send(b, held.pop(HELD[action.op]))
        case Op.RECV_ACT | Op.RECV_GRAD | Op.RECV_TARGET | Op.TAKE_TARGET:
            held[HELD[action.op]] = context.receivers[RECEIVES[action.op].what].recv(b)
        case Op.LOAD:
            assert context.batches is not None
            loaded = next(context.batches)
            held["act"], held["target"] = loaded[: context.num_inputs], loaded[context.num_inputs :]
        case Op.UPDATE:
            stage.update()
        case Op.WEIGHTS:
            stage.use_weights(b)
        case Op.RECOMPUTE:
            stage.recompute(b)
        case Op.PREDICT:
            held["out"] = stage.predict(b, held.pop("act"), *(held["target"] if stage.is_last else NO_TARGET))
        case Op.SEND_GO:
            if stage.is_last:
                stage.wait_for_device()  # on a GPU the forward is only launched by now
            context.senders["go"].send(b, (torch.zeros(context.work.sizes[b], dtype=torch.uint8),))
        case Op.RECV_GO:
            context.receivers["go"].recv(b)
        case Op.BACKWARD_INPUT:
            grads = (context.loss_grads[b],) if stage.has_loss else held.pop("grad")
            held["grad"] = stage.backward_input(b, grads, completes=b in context.last_of_groups)
        case Op.BACKWARD_WEIGHT:
            stage.backward_weight(b, completes=b in context.last_of_groups)
        case Op.PREDICT_GRADIENT:
            target = held.get("target", NO_TARGET)[0]
            weight = context.work.loss_weights[b]
            held["grad"] = _head_of(stage).predict(b, held["out"], target, weight=weight)
        case Op.LEARN:
            _head_of(stage).learn(b, held.pop("grad"))
        case Op.UPDATE_HEAD:
            _head_of(stage).update()
        case Op.UPDATE_TIED:
            assert action.tie is not None
            stage.update_tied(action.tie.number)
        case _:
            _exchange(action, context)


def _exchange(action: Action, context: StageContext) -> None:
    """Execute an action that sums tied gradients or norms over stages."""
    stage, b, what = context.stage, action.number, what_of(action)
    summed = stage.ties[action.tie.number] if action.tie is not None else stage.model_norm
    assert summed is not None, "the schedule has these actions if stages clip by the norm of the model"
    match action.op:
        case Op.SEND_PART | Op.SEND_NORM:
            context.senders[what].send(b, summed.part())
        case Op.RECV_PART | Op.RECV_NORM:
            summed.add(context.receivers[what].recv(b))
        case Op.SEND_SUM | Op.SEND_TOTAL:
            context.senders[what].send(b, summed.total())
        case Op.RECV_SUM | Op.RECV_TOTAL:
            summed.take(context.receivers[what].recv(b))


def _head_of(stage: Stage) -> GradientHead:
    assert stage.gradient_head is not None, "the schedule has these actions for stages with such a head"
    return stage.gradient_head


def _profiled_step(action: Action, context: StageContext) -> None:
    with record_function(f"stage {context.stage.index}: {action}"):
        step(action, context)
