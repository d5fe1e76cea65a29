"""Records when each action of the schedule began and ended, all stages on one clock.

An action is one event. The tracer is a generator around the order of actions, so it sees both ends of each; a run that
is not traced has no tracer in its chain, and pays nothing. What lies between two events of a stage (reports, taking
the next action, waiting for the last messages of a segment to leave, and in one process the other stages) is no event.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.monitor.clock import seconds_to_rank_0
from adl_dist.schedule import Action, Op, Segment

MOST_EVENTS = 200_000  # kept of each stage, the first ones; about 30 MB of memory, and as much on disk

# What each action counts as, and what an event of it is called.
KINDS = {
    Op.LOAD: ("load", "load"),
    Op.RECV_ACT: ("wait_act", "wait for act"),
    Op.RECV_GRAD: ("wait_grad", "wait for grad"),
    Op.RECV_TARGET: ("wait_other", "wait for target"),
    Op.RECV_GO: ("wait_other", "wait for go"),
    Op.TAKE_TARGET: ("wait_other", "wait for label"),
    Op.FORWARD: ("forward", "forward"),
    Op.FORWARD_ONLY: ("forward", "forward without graph"),
    Op.PREDICT: ("forward", "predict"),
    Op.RECOMPUTE: ("recompute", "recompute"),
    Op.BACKWARD: ("backward", "backward"),
    Op.UPDATE: ("update", "update"),
    Op.SEND_ACT: ("send", "send act"),
    Op.SEND_GRAD: ("send", "send grad"),
    Op.SEND_TARGET: ("send", "send target"),
    Op.SEND_GO: ("send", "send go"),
    Op.PASS_TARGET: ("send", "send label"),
    Op.WEIGHTS: ("other", "choose weights"),
    Op.KEEP: ("other", "keep in buffer"),
    Op.PICK: ("other", "pick from buffer"),
    Op.DROP: ("other", "drop from buffer"),
}
OTHER = "other"  # also all time that is in no event
SHARES = tuple(dict.fromkeys(counts_as for counts_as, _ in KINDS.values()))


class Event(NamedTuple):
    """One action of one stage.

    Attributes:
        op: what was done.
        number: of the micro-batch within the segment; see :class:`Action`.
        begin: seconds on this process's clock.
        end: the same.
        version: updates that the stage had made.
        forward_version: those that had led to the weights of the micro-batch's forward; None where there is none.
    """

    op: Op
    number: int
    begin: float
    end: float
    version: int
    forward_version: int | None


@dataclass(frozen=True, kw_only=True)
class SegmentTrace:
    """What was recorded of one segment.

    Attributes:
        segment: that was run.
        training: or evaluated.
        shift: seconds from this process's clock to that of rank 0.
        events: of each stage, in order.
    """

    segment: Segment
    training: bool
    shift: float
    events: dict[int, list[Event]]


@dataclass
class Tracer:
    """Of the stages of one process.

    Attributes:
        world: of this process.
        most: events kept of each stage.
        stretches: what was recorded, by segment.
        num_kept: events of each stage.
        num_left_out: events of each stage that came after the most.
    """

    world: World
    most: int = MOST_EVENTS
    stretches: list[SegmentTrace] = field(default_factory=list)
    num_kept: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    num_left_out: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _spent: dict[int, dict[Op, float]] = field(default_factory=dict)

    def traced(
        self,
        order: Iterable[tuple[int, Action]],
        contexts: Mapping[int, StageContext],
        segment: Segment,
        *,
        training: bool,
    ) -> Iterator[tuple[int, Action]]:
        """Hand ``order`` through, recording each action while whoever takes it carries it out."""
        stretch = SegmentTrace(
            segment=segment,
            training=training,
            shift=seconds_to_rank_0(self.world),
            events={k: [] for k in contexts},
        )
        self.stretches.append(stretch)
        self._spent = {k: dict.fromkeys(Op, 0.0) for k in contexts}
        on_device = _OnDevice(self.world.device, self._keep) if self.world.device.type == "cuda" else None
        now = time.perf_counter
        for k, action in order:
            op, b = action
            stage, events, forward_version = contexts[k].stage, stretch.events[k], None
            if op is Op.BACKWARD or op is Op.RECOMPUTE:  # the backward forgets it
                forward_version = stage.in_flight[b].version
            version = stage.version
            begin = on_device.mark() if on_device else None
            begun = now()
            yield k, action
            ended = now()
            if op is Op.FORWARD or op is Op.FORWARD_ONLY:
                forward_version = stage.in_flight[b].version
            event = Event(op, b, begun, ended, version, forward_version)
            if on_device is None:
                self._keep(k, events, event)
            else:
                assert begin is not None
                on_device.keep(k, events, event, begin)
        if on_device is not None:
            on_device.settle(wait=True)

    def spent(self, stage: int, seconds: float) -> dict[str, float]:
        """How ``stage`` spent the ``seconds`` of the last segment, by the names of ``SHARES``; all events count."""
        spent = dict.fromkeys(SHARES, 0.0)
        for op, of_op in self._spent[stage].items():
            spent[KINDS[op][0]] += of_op
        spent[OTHER] += seconds - sum(spent.values())
        return spent

    def _keep(self, stage: int, events: list[Event], event: Event) -> None:
        self._spent[stage][event.op] += event.end - event.begin
        if self.num_kept[stage] < self.most:
            self.num_kept[stage] += 1
            events.append(event)
        else:
            self.num_left_out[stage] += 1


class _OnDevice:
    """Times on a GPU, where the host only launches: marks in the stream of work, read when the device has passed them.

    Of a receive that is then the time for which the stream had nothing to do but to wait for the message.
    """

    MOST_OPEN = 256  # events, before some are read; the device is rarely that far behind
    MOST_SECONDS = 10.0  # from the base, because distances are told in float32

    def __init__(self, device: torch.device, keep: Callable[[int, list[Event], Event], None]) -> None:
        self._device, self._keep = device, keep
        self._spare: list[torch.cuda.Event] = []
        self._open: deque[tuple[int, list[Event], Event, torch.cuda.Event, torch.cuda.Event]] = deque()
        torch.cuda.synchronize(device)
        self._base = self.mark()
        self._base.synchronize()
        self._base_time = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """A mark behind all that has been launched."""
        mark = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def keep(self, stage: int, events: list[Event], event: Event, begin: torch.cuda.Event) -> None:
        """Keep ``event`` with its times on the device, once they are known."""
        self._open.append((stage, events, event, begin, self.mark()))
        if len(self._open) > self.MOST_OPEN:
            self.settle(wait=False)

    def settle(self, *, wait: bool) -> None:
        """Keep what the device has done; ``wait`` until that is all."""
        if wait:
            torch.cuda.synchronize(self._device)
        while self._open and self._open[0][-1].query():
            stage, events, event, begin, end = self._open.popleft()
            begun, ended = self._time_of(begin), self._time_of(end)
            self._keep(stage, events, event._replace(begin=begun, end=ended))
            if ended - self._base_time > self.MOST_SECONDS:
                self._base, end = end, self._base
                self._base_time = ended
            self._spare += [begin, end]

    def _time_of(self, mark: torch.cuda.Event) -> float:
        return self._base_time + float(self._base.elapsed_time(mark)) / 1000
