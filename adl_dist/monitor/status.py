"""The status of one process: a view of its activity log, as the watchdog and ``adl-dist status`` see it."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from adl_dist.checkpoint.layout import progress
from adl_dist.distributed.procfs import machine, start_time
from adl_dist.distributed.world import launched_rank
from adl_dist.monitor import process
from adl_dist.monitor.activity import FAILED, FINISHING, IDLE, KINDS, ActivityLog, SegmentActivity
from adl_dist.schedule import Action, Op
from adl_dist.schedule.actions import LINKS, RECEIVES

AWAITING = "wait for the next command"
COORDINATOR = -1  # the peer that an idle stage waits for
FORWARDS = (Op.FORWARD, Op.FORWARD_ONLY, Op.PREDICT)
Doing = tuple[int, Action, float] | None


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """The status of one stage.

    Attributes:
        stage: its index.
        doing: its present action in words.
        op: that action as schedules print it; "" where there is none.
        number: the action's micro-batch or group within the segment.
        seconds: time since that action began.
        waits_for: stages that the action waits for.
        last: the number of the last finished action of each op.
        counts: how many actions of each op are finished in the segment.
        segment: how many segments, of training or evaluation, the process has begun; the same on all processes.
        epoch: the epoch trained last, counted from 0.
        update: updates done over the run.
        micro_batch: the micro-batch of the last finished forward; None: none yet.
        images_per_second: images that have gone through per second of the segment.
        busy_share: share of the segment's time that was spent in forward, backward and update.
        staleness_mean: over the segment's backwards, in updates; None: there was none.
    """

    stage: int
    doing: str = IDLE
    op: str = ""
    number: int = 0
    seconds: float = 0.0
    waits_for: list[int] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    segment: int = 0
    epoch: int = 0
    update: int = 0
    micro_batch: int | None = None
    images_per_second: float = 0.0
    busy_share: float = 0.0
    staleness_mean: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The status of one process.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        machine: equal for two processes only if each sees the other in /proc.
        start_time: when the process began, in the kernel's ticks, because process ids are used again; 0: not known.
        phase: the command that it carries out, or ``start``, ``idle``, ``finishing`` or ``failed``.
        seconds: time since the phase began.
        mark: a text that changes with everything the process does.
        stages: the stages that live in it.
        at: where its main thread is in the program; only if asked closely.
        loaders: process id and state of each process that loads data for it, while it waits for them.
        memory_bytes: memory that it holds now, on the GPU if it computes there.
        saving: what a second thread does for a checkpoint: ``saving``, ``committing`` or, mostly, "" (nothing).
        saving_at: where that thread is in the program; only if asked closely.
        is_debugged: whether a Python debugger follows it; only if asked closely.
        runs_ahead: whether its actions are launched on a GPU that also sends and receives, so that the device may not
            yet have done what the process has.
    """

    host: str
    pid: int
    machine: str = ""
    start_time: int = 0
    phase: str = IDLE
    seconds: float = 0.0
    mark: str = ""
    stages: list[StageStatus] = field(default_factory=list)
    at: str = ""
    loaders: list[tuple[int, str]] = field(default_factory=list)
    memory_bytes: int = 0
    saving: str = ""
    saving_at: str = ""
    is_debugged: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One process of the job, as rank 0 knows it.

    Attributes:
        rank: its rank.
        seen: its last answer; None: none yet.
        silent_seconds: time for which it has not answered; 0: it answers.
        state: for a silent process, the kernel's letter for its state, or ``gone``; "": not known.
    """

    rank: int
    seen: ProcessStatus | None = None
    silent_seconds: float = 0.0
    state: str = ""

    @property
    def name(self) -> str:
        """Return its name for messages."""
        where = f" ({self.seen.host}, pid {self.seen.pid})" if self.seen else ""
        several = self.seen is not None and len(self.seen.stages) > 1
        return f"{'the process of all stages' if several else f'stage {self.rank}'}{where}"


@dataclass(frozen=True)
class CoordinatorStatus:
    """The status of the coordinator on rank 0.

    Attributes:
        command: the command given last; "": none yet.
        is_waiting: whether it waits for the stages' results; else it does work of its own after them.
        seconds: time since that began.
        at: where its thread is in the program; only if asked closely.
    """

    command: str = ""
    is_waiting: bool = False
    seconds: float = 0.0
    at: str = ""

    @property
    def doing(self) -> str:
        """Return what it does, in words."""
        if not self.command:
            return "at work before its first command"
        return f"{'waits for the results of' if self.is_waiting else 'at work after'} '{self.command}'"


def process_status(log: ActivityLog, *, closely: bool = False) -> ProcessStatus:
    """Return the status of this process, from any thread; ``closely``: also where it is in its program."""
    now = time.perf_counter()
    # Each read once, because the main thread changes them meanwhile.
    (phase, since), doing, segment = log.phase, log.doing, log.present
    if segment is not None:
        numbers = _numbers_of(segment, is_over=phase in (IDLE, FAILED), now=now)
        stages = [
            StageStatus(stage=k, epoch=log.epoch, **numbers[k], **_present(k, log.num_stages, phase, since, doing, now))
            for k in sorted(segment.stages)
        ]
    elif phase == IDLE:
        waits_for = [COORDINATOR]
        stages = [StageStatus(stage=launched_rank(), doing=AWAITING, seconds=now - since, waits_for=waits_for)]
    else:
        stages = [StageStatus(stage=launched_rank(), doing=phase, seconds=now - since)]
    saver = process.saver()
    return ProcessStatus(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine(),
        start_time=start_time(os.getpid()),
        phase=phase,
        seconds=now - since,
        mark=f"{since} {doing[2] if doing else ''} {progress.num_pieces}",
        stages=stages,
        at=process.user_frame(threading.main_thread().ident) if closely else "",
        loaders=process.loaders() if closely and doing is not None and doing[1].op is Op.LOAD else [],
        memory_bytes=process.memory_bytes(log.device),
        saving=saver.name if saver else "",
        saving_at=process.user_frame(saver.ident) if closely and saver else "",
        is_debugged=closely and process.is_debugged(),
        runs_ahead=log.runs_ahead,
    )


def _present(k: int, num_stages: int, phase: str, since: float, doing: Doing, now: float) -> dict[str, Any]:
    """Return what stage ``k`` does now, since when, and which stages it waits for."""
    if doing is not None and doing[0] == k:
        (op, number), since = doing[1], doing[2]
        peers = _peers(k, op, num_stages)
        where = f" {'from' if op in RECEIVES else 'to'} stage {peers[0]}" if peers else ""
        text = f"{KINDS[op][1]} {number}{where}"
        return {"doing": text, "op": op.value, "number": number, "waits_for": peers, "seconds": now - since}
    text, waits_for = phase, []
    if doing is not None:
        text, waits_for = "wait for its turn", [doing[0]]
    elif phase == IDLE:
        text, waits_for = AWAITING, [COORDINATOR]
    elif phase == FINISHING:
        text = "wait for the last messages to leave"
        waits_for = [n for n in (k - 1, k + 1) if 0 <= n < num_stages]
    return {"doing": text, "waits_for": waits_for, "seconds": now - since}


def _numbers_of(segment: SegmentActivity, *, is_over: bool, now: float) -> dict[int, dict[str, Any]]:
    """Return the figures of each stage in ``segment``; rates are 0 when it is over."""
    elapsed = max(now - segment.began, 1e-9)
    through = Op.BACKWARD if segment.training else Op.PREDICT
    numbers = {}
    for k, activity in segment.stages.items():
        last, counts = dict(activity.last), {op: n for op, n in dict(activity.counts).items() if n}
        # Counted, as numbers may go down (GPipe's gradients do); and not sliced: the copy would grow with the epoch.
        num_samples = sum(islice(activity.context.work.sizes, counts.get(through, 0)))
        num_backwards = counts.get(Op.BACKWARD, 0)
        numbers[k] = {
            "last": {op.value: n for op, n in last.items()},
            "counts": {op.value: n for op, n in counts.items()},
            "segment": segment.number,
            "update": activity.context.stage.version,
            "micro_batch": max((last[op] for op in FORWARDS if op in last), default=None),
            "images_per_second": 0.0 if is_over else num_samples / elapsed,
            "busy_share": 0.0 if is_over else activity.busy_seconds / elapsed,
            "staleness_mean": activity.staleness_sum / num_backwards if num_backwards else None,
        }
    return numbers


def _peers(k: int, op: Op, num_stages: int) -> list[int]:
    if op in LINKS:
        hop = LINKS[op].hop
        return [num_stages - 1 if hop is None else k + hop]
    if op in RECEIVES:
        hop = RECEIVES[op].hop
        return [0 if hop is None else k - hop]
    return []


def kill(seen: ProcessStatus) -> None:
    """Kill a process that does not answer, if it is on this machine: stopped or stuck, it would stay."""
    if seen.machine == machine() != "" and start_time(seen.pid) == seen.start_time:
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)
