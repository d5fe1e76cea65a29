"""The record of what the stages of one process do: each action once, with when it began and ended.

The engine's loop writes it, without a lock; status.py, trace.py and the results of a segment are views of it. Its size
does not grow with the run: each stage has sums for each kind of action, and its first events where they are wanted.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from adl_dist.engine import StageContext
from adl_dist.schedule import Action, Op, Segment

STARTING = "start"  # the phase of a process whose stages are not built yet
IDLE = "idle"  # the process waits for the coordinator's next command
FINISHING = "finishing"  # all actions are done, but what was sent last has not left yet
FAILED = "failed"  # the command raised

# The share that the time of each kind of action counts to, and the name of such an action.
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
OTHER = "other"  # also all time between actions
SHARES = tuple(dict.fromkeys(share for share, _ in KINDS.values()))
BUSY = ("forward", "recompute", "backward", "update")


CPU = torch.device("cpu")


class Event(NamedTuple):
    """One action of one stage.

    Attributes:
        op: the kind of action.
        number: the micro-batch within the segment; see :class:`Action`.
        begin: seconds on this process's ``time.perf_counter``.
        end: the same.
        version: updates that the stage had made when the action began.
        forward_version: updates behind the weights of the micro-batch's forward; None where there is no forward.
    """

    op: Op
    number: int
    begin: float
    end: float
    version: int
    forward_version: int | None


@dataclass
class StageActivity:
    """The sums over one stage's finished actions of the present segment.

    Attributes:
        context: the stage with its channels.
        counts: finished actions of each kind.
        seconds: time spent in each kind of action (on a GPU: to launch it).
        last: the number of the last finished action of each kind that has occurred.
        staleness_sum: over all backwards, in updates.
        staleness_max: the largest of them.
        num_skipped: updates that were skipped.
        events: the actions themselves, in order, where they are kept; see :meth:`ActivityLog.keep_events`.
    """

    context: StageContext
    counts: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(Op, 0))
    seconds: dict[Op, float] = field(default_factory=lambda: dict.fromkeys(Op, 0.0))
    last: dict[Op, int] = field(default_factory=dict)
    staleness_sum: int = 0
    staleness_max: int = 0
    num_skipped: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def busy_seconds(self) -> float:
        """Return the time in forward, backward, recomputation and update."""
        return sum(seconds for op, seconds in self.seconds.items() if KINDS[op][0] in BUSY)

    def spent(self, seconds: float) -> dict[str, float]:
        """Return how the stage spent the ``seconds`` of the segment, by the names of ``SHARES``."""
        spent = dict.fromkeys(SHARES, 0.0)
        for op, of_op in self.seconds.items():
            spent[KINDS[op][0]] += of_op
        spent[OTHER] += seconds - sum(spent.values())
        return spent


@dataclass
class SegmentActivity:
    """One segment of training or of evaluation in this process.

    Attributes:
        number: segments that this process had begun, this one included.
        segment: the data and updates of it.
        training: whether it is training or evaluation.
        began: seconds on this process's ``time.perf_counter``.
        stages: the sums of each stage.
    """

    number: int
    segment: Segment
    training: bool
    began: float
    stages: dict[int, StageActivity]


class ActivityLog:
    """The record of one process. The main thread writes; any thread reads plain attributes, each of them once.

    Attributes:
        num_stages: K, of the whole job.
        device: where this process computes.
        runs_ahead: see :class:`adl_dist.monitor.status.ProcessStatus`.
        phase: the command that is carried out or one of the constants above, and since when.
        doing: the action begun last, with its stage and when it began; None: no action is carried out.
        present: the segment that was begun last; None: none was.
        stages: the sums of each stage in that segment.
        epoch: the epoch trained last, counted from 0.
        segments: all segments of which events are kept.
        num_kept: events kept of each stage.
        num_left_out: events of each stage that came after the most.
    """

    def __init__(self, num_stages: int, *, device: torch.device = CPU, runs_ahead: bool = False) -> None:
        self.num_stages, self.device, self.runs_ahead = num_stages, device, runs_ahead
        self.phase = (STARTING, time.perf_counter())
        self.doing: tuple[int, Action, float] | None = None
        self.present: SegmentActivity | None = None
        self.epoch = 0
        self.segments: list[SegmentActivity] = []
        self.num_kept: dict[int, int] = defaultdict(int)
        self.num_left_out: dict[int, int] = defaultdict(int)
        self._most_events = 0
        self.stages: Mapping[int, StageActivity] = {}

    @property
    def keeps_events(self) -> bool:
        """Whether events are kept."""
        return self._most_events > 0

    def keep_events(self, most: int) -> None:
        """Keep the first ``most`` events of each stage from now on; 0: none."""
        self._most_events = most

    def activate(self) -> None:
        """Note that this process waits for commands from now on."""
        self.phase = (IDLE, time.perf_counter())

    @contextmanager
    def during(self, command: str) -> Iterator[None]:
        """Be in the phase ``command`` while inside."""
        self.phase = (command, time.perf_counter())
        try:
            yield
        except BaseException:
            self.doing = None
            self.phase = (FAILED, time.perf_counter())
            raise
        self.doing = None
        self.phase = (IDLE, time.perf_counter())

    def open(self, contexts: Mapping[int, StageContext], segment: Segment, *, training: bool) -> None:
        """Begin the record of ``segment``, which the stages of ``contexts`` carry out."""
        if training:  # evaluation has no epoch of its own
            self.epoch = segment.epoch
        self.stages = stages = {k: StageActivity(context) for k, context in contexts.items()}
        number = self.present.number + 1 if self.present is not None else 1
        self.present = SegmentActivity(number, segment, training, time.perf_counter(), stages)
        if self.keeps_events:
            self.segments.append(self.present)

    def begin(self, stage: int, action: Action) -> None:
        """See :class:`adl_dist.engine.ActionLog`."""
        self.doing = (stage, action, time.perf_counter())

    def end(self) -> None:
        """See :class:`adl_dist.engine.ActionLog`."""
        ended = time.perf_counter()
        assert self.doing is not None, "begin comes before"
        k, action, began = self.doing
        op, number = action
        of_stage = self.stages[k]
        of_stage.counts[op] += 1
        of_stage.seconds[op] += ended - began
        of_stage.last[op] = number
        if op is Op.BACKWARD:
            staleness = of_stage.context.stage.tally.staleness[-1]
            of_stage.staleness_sum += staleness
            if staleness > of_stage.staleness_max:
                of_stage.staleness_max = staleness
        elif op is Op.UPDATE:
            of_stage.num_skipped += of_stage.context.stage.tally.skipped is not None
        if self._most_events:
            self._keep(k, of_stage, action, began, ended)

    def close(self) -> None:
        """Note that all actions of the segment are done."""
        self.doing = None
        self.phase = (FINISHING, time.perf_counter())

    def _keep(self, k: int, of_stage: StageActivity, action: Action, began: float, ended: float) -> None:
        if self.num_kept[k] >= self._most_events:
            self.num_left_out[k] += 1
            return
        op, number = action
        stage, forward_version = of_stage.context.stage, None
        version = stage.version - (op is Op.UPDATE)
        if op is Op.BACKWARD:
            forward_version = version - stage.tally.staleness[-1]
        elif op in (Op.FORWARD, Op.FORWARD_ONLY, Op.RECOMPUTE):
            forward_version = stage.in_flight[number].version
        self.num_kept[k] += 1
        of_stage.events.append(Event(op, number, began, ended, version, forward_version))
