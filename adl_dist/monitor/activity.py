"""The record of one process's actions, with their begin and end.

The engine's loop writes it, without a lock; status.py, trace.py and the results of a segment are views of it. Its size
does not grow with the run: for each stage it has sums per kind of action, and the first events for a trace.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from adl_dist.engine import StageContext
from adl_dist.report.timeline import Timed, Timeline
from adl_dist.schedule import Action, Op, Pipeline, Segment
from adl_dist.schedule.actions import BACKWARDS, LINKS, RECEIVES

STARTING = "start"  # the phase of a process whose stages are not built yet
IDLE = "idle"  # the process waits for the coordinator's next command
FINISHING = "finishing"  # all actions are done, but the last messages have not left yet
FAILED = "failed"  # the command raised
USER_CODE = "callbacks, loggers and metrics"  # the user's, called between two actions

WAITS = {Op.RECV_ACT: "wait_act", Op.RECV_GRAD: "wait_grad"}
# For each kind of action: the share that its time counts to, and its name.
KINDS = {
    Op.LOAD: ("load", "load"),
    **{op: (WAITS.get(op, "wait_other"), f"wait for {link.what}") for op, link in RECEIVES.items()},
    Op.FORWARD: ("forward", "forward"),
    Op.FORWARD_ONLY: ("forward", "forward without graph"),
    Op.PREDICT: ("forward", "predict"),
    Op.RECOMPUTE: ("recompute", "recompute"),
    Op.BACKWARD: ("backward", "backward"),
    Op.BACKWARD_INPUT: ("backward", "backward of inputs"),
    Op.BACKWARD_WEIGHT: ("backward", "backward of weights"),
    Op.PREDICT_GRADIENT: ("forward", "predict gradient"),
    Op.LEARN: ("backward", "train head"),
    Op.UPDATE: ("update", "update"),
    Op.UPDATE_HEAD: ("update", "update head"),
    Op.UPDATE_TIED: ("update", "update tied weights"),
    **{op: ("send", f"send {link.what}") for op, link in LINKS.items()},
    Op.WEIGHTS: ("other", "choose weights"),
}
OTHER = "other"  # also all time between actions
SHARES = tuple(dict.fromkeys(share for share, _ in KINDS.values()))
BUSY = ("forward", "recompute", "backward", "update")
CPU = torch.device("cpu")
SHOWN = 16  # micro-batches that the timeline of a run shows of each stage


@dataclass
class StageActivity:
    """The sums over one stage's finished actions of the present segment."""

    context: StageContext
    counts: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(Op, 0))
    seconds: dict[Op, float] = field(default_factory=lambda: dict.fromkeys(Op, 0.0))  # on a GPU: to launch them
    last: dict[Op, int] = field(default_factory=dict)  # the number of the last action of each kind that has occurred
    staleness_sum: int = 0  # over all backwards, in updates
    staleness_max: int = 0
    num_skipped: int = 0  # updates

    @property
    def busy_seconds(self) -> float:
        """The time in forward, backward, recomputation and update."""
        return sum(seconds for op, seconds in self.seconds.items() if KINDS[op][0] in BUSY)

    def spent(self, seconds: float) -> dict[str, float]:
        """Return the ``seconds`` of the segment divided among ``SHARES``."""
        spent = dict.fromkeys(SHARES, 0.0)
        for op, of_op in self.seconds.items():
            spent[KINDS[op][0]] += of_op
        spent[OTHER] += seconds - sum(spent.values())
        return spent


@dataclass
class SegmentActivity:
    """One segment of training or of evaluation in this process."""

    number: int  # of the segments that this process has begun, counted from 1
    segment: Segment
    training: bool
    began: float  # seconds on this process's time.perf_counter
    stages: dict[int, StageActivity]


class Event(NamedTuple):
    """One action of one stage."""

    segment: SegmentActivity
    action: Action
    begin: float  # seconds on this process's time.perf_counter
    end: float
    version: int  # updates that the stage had made when the action began
    forward_version: int | None  # updates before the micro-batch's forward, or None without a forward

    @property
    def staleness(self) -> int | None:
        """The staleness of a backward in updates, None of other actions."""
        return self.version - (self.forward_version or 0) if self.action.op in BACKWARDS else None


class Window(NamedTuple):
    """The part of a segment that its timeline shows."""

    after: int  # the group of the first update, or -1 for the beginning of the segment
    until: int  # the group of the last update
    is_steady: bool  # whether the pipeline is full all the time

    @classmethod
    def of(cls, pipeline: Pipeline, segment: Segment) -> "Window":
        """Return a window in the middle of ``segment`` with all stages at work."""
        fill, last = pipeline.updates_to_fill, segment.num_updates - 1
        num_updates = max(2, -(-(SHOWN + 2 * pipeline.num_stages) // pipeline.micro_batches_per_update))
        until = min(max(last // 2, fill) + num_updates, last)
        after = max(until - num_updates, -1)
        is_steady = after >= fill - 1 and until <= last - fill and segment.epoch >= pipeline.method.flush_epochs
        return cls(after, until, is_steady)


class ActivityLog:
    """The record of one process's actions. Only the main thread writes.

    It keeps the first ``most_events`` events of each stage, and the events in the window of a segment.
    """

    def __init__(self, num_stages: int, *, device: torch.device = CPU, runs_ahead: bool = False) -> None:
        """Begin a record, with ``runs_ahead`` as in :class:`ProcessStatus`."""
        self.num_stages, self.device, self.runs_ahead = num_stages, device, runs_ahead
        self.phase = (STARTING, time.perf_counter())  # the command carried out, or one of the above; since when
        self.doing: tuple[int, Action, float] | None = None  # the action under way, its stage, when it began
        self.present: SegmentActivity | None = None  # begun last
        self.stages: dict[int, StageActivity] = {}  # of that segment
        self.epoch = 0  # trained last
        self.most_events = 0
        self.events: dict[int, list[Event]] = defaultdict(list)  # of each stage
        self.num_left_out: dict[int, int] = defaultdict(int)
        self.window: Window | None = None  # of the present segment
        self._in_timeline: dict[int, list[Event]] = defaultdict(list)  # those in the window
        self._in_window: set[int] = set()  # stages that are in the window now
        self._keeps = False

    def enter(self, phase: str) -> None:
        """Begin ``phase``, without an action so far."""
        self.doing = None
        self.phase = (phase, time.perf_counter())

    @contextmanager
    def during(self, command: str) -> Iterator[None]:
        """Set the phase to ``command`` in the block, then to idle or failed."""
        self.enter(command)
        try:
            yield
        except BaseException:
            self.enter(FAILED)
            raise
        self.enter(IDLE)

    def open(
        self,
        contexts: Mapping[int, StageContext],
        segment: Segment,
        *,
        training: bool,
        window: Window | None = None,
    ) -> None:
        """Begin the record of ``segment``."""
        if training:  # evaluation has no epoch of its own
            self.epoch = segment.epoch
        self.stages = {k: StageActivity(context) for k, context in contexts.items()}
        number = self.present.number + 1 if self.present is not None else 1
        self.present = SegmentActivity(number, segment, training, time.perf_counter(), self.stages)
        self.window = window
        self._in_timeline.clear()
        self._in_window = {*contexts} if window is not None and window.after < 0 else set()
        self._keeps = bool(self.most_events or self._in_window)

    def begin(self, stage: int, action: Action) -> None:
        """Note that ``stage`` begins ``action`` now."""
        self.doing = (stage, action, time.perf_counter())

    def end(self) -> None:
        """Note that the action begun last is done now."""
        ended = time.perf_counter()
        assert self.doing is not None, "begin comes before"
        k, action, began = self.doing
        op, number, *_ = action
        of_stage = self.stages[k]
        of_stage.counts[op] += 1
        of_stage.seconds[op] += ended - began
        of_stage.last[op] = number
        if op in BACKWARDS:
            staleness = of_stage.context.stage.tally.staleness[-1]
            of_stage.staleness_sum += staleness
            if staleness > of_stage.staleness_max:
                of_stage.staleness_max = staleness
        elif op is Op.UPDATE:
            of_stage.num_skipped += of_stage.context.stage.tally.skipped is not None
            if self.window is not None:
                self._pass(k, number, self.window)
        if self._keeps:
            self._keep(k, action, began, ended)

    def _pass(self, k: int, number: int, window: Window) -> None:
        """Let stage ``k`` enter or leave the window with an update."""
        if number == window.after:
            self._in_window.add(k)
        elif number == window.until:
            self._in_window.discard(k)
        self._keeps = bool(self.most_events or self._in_window)

    def _keep(self, k: int, action: Action, began: float, ended: float) -> None:
        """Keep an event for the trace, the timeline, or both."""
        assert self.present is not None, "open comes before"
        stage, op = self.stages[k].context.stage, action.op
        version, forward_version = stage.version - (op is Op.UPDATE), None
        if op in BACKWARDS:
            forward_version = version - stage.tally.staleness[-1]
        elif op in (Op.FORWARD, Op.FORWARD_ONLY, Op.RECOMPUTE) and action.number in stage.in_flight:
            forward_version = stage.in_flight[action.number].version
        event = Event(self.present, action, began, ended, version, forward_version)
        if k in self._in_window:
            self._in_timeline[k].append(event)
        if len(self.events[k]) < self.most_events:
            self.events[k].append(event)
        else:
            self.num_left_out[k] += 1

    def timeline(self, stage: int) -> Timeline | None:
        """Return the timeline of ``stage`` on the wall clock, or None."""
        events = self._in_timeline.get(stage)
        if self.window is None or not events:
            return None
        offset = wall_offset()
        return Timeline(
            epoch=self.epoch,
            device=self.device.type,
            is_steady=self.window.is_steady and stage not in self._in_window,  # else it was ended within the window
            stages=[
                [
                    Timed(e.action.op.value, e.action.number, e.begin + offset, e.end + offset, e.staleness)
                    for e in events
                ]
            ],
        )


def wall_offset() -> float:
    """Return time.time() minus time.perf_counter()."""
    readings = []
    for _ in range(5):  # the closest of a few: this process may lose its core between two clocks
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]
