"""The status of one process, from its activity log."""

import gc
import multiprocessing
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from adl_dist.checkpoint.async_save import COMMITTING, SAVING
from adl_dist.checkpoint.storage import progress
from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.world import launched_rank
from adl_dist.monitor.activity import FAILED, FINISHING, IDLE, KINDS, ActivityLog, SegmentActivity
from adl_dist.schedule import Action, Op
from adl_dist.schedule.actions import BACKWARDS, LINKS, message_of

COORDINATOR = -1  # stands for the peer of an idle stage
FORWARDS = (Op.FORWARD, Op.FORWARD_ONLY, Op.PREDICT)
# The reported line of a hanging process is the line that called into torch or the standard library. Packages lie in the
# folder of the standard library.
TORCH, STANDARD_LIBRARY = str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib")
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """The status of one stage; numbers are within the segment."""

    stage: int
    doing: str = IDLE  # its present action in words
    op: Op | None = None
    number: int = 0  # the action's micro-batch or group
    seconds: float = 0.0  # since that action began
    waits_for: list[int] = field(default_factory=list)  # stages
    last: Mapping[Op, int] = field(default_factory=dict)  # the number of the last finished action of each kind
    counts: Mapping[Op, int] = field(default_factory=dict)  # finished actions of each kind in the segment
    segment: int = 0  # segments, of training or evaluation, that the process has begun; the same on all processes
    epoch: int = 0  # trained last, counted from 0
    update: int = 0  # updates done over the run
    micro_batch: int | None = None  # of the last finished forward
    images_per_second: float = 0.0  # in the segment
    busy_share: float = 0.0  # share of forward, backward and update in the segment's time
    staleness_mean: float | None = None  # over the segment's backwards, in updates


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The status of one process."""

    host: str
    pid: int
    machine: str = ""  # equal for two processes only if each sees the other in /proc
    start_time: int = 0  # in ticks of the kernel, because process ids are reused; 0 if unknown
    phase: str = IDLE  # the running command, or start, idle, finishing or failed
    mark: str = ""  # changes with every progress of the process
    stages: list[StageStatus] = field(default_factory=list)
    at: str = ""  # line of its main thread
    loaders: list[tuple[int, str]] = field(default_factory=list)  # (id, state) of loader processes that are awaited
    memory_bytes: int = 0  # held now, on the GPU if it computes there
    saving: str = ""  # "saving" or "committing" while a second thread works on a checkpoint
    saving_at: str = ""  # line of that thread
    is_debugged: bool = False  # whether a Python debugger is active
    runs_ahead: bool = False  # whether a GPU may not have finished the messages of finished actions

    @property
    def where(self) -> str:
        """The host and process id, for messages."""
        return f"({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One process of the job, as rank 0 knows it."""

    rank: int
    seen: ProcessStatus | None = None  # its last answer
    silent_seconds: float = 0.0  # without an answer
    state: str = ""  # of a silent process: the kernel's letter for its state, or "gone", if known

    @property
    def name(self) -> str:
        """The name of the process in messages."""
        if self.seen is None:
            return f"stage {self.rank}"
        several = len(self.seen.stages) > 1
        return f"{'the process of all stages' if several else f'stage {self.rank}'} {self.seen.where}"


@dataclass(frozen=True)
class CoordinatorStatus:
    """The status of the coordinator on rank 0."""

    command: str = ""  # the last one, if any
    is_waiting: bool = False  # whether it waits for the stages' results, or works on its own after them
    seconds: float = 0.0  # since that began
    at: str = ""  # line of its thread

    @property
    def doing(self) -> str:
        """The present activity in words."""
        if not self.command:
            return "at work before its first command"
        return f"{'waits for the results of' if self.is_waiting else 'at work after'} '{self.command}'"


def process_status(log: ActivityLog) -> ProcessStatus:
    """Return the status of this process."""
    # Each read once, because the main thread changes them meanwhile.
    (phase, since), doing, segment = log.phase, log.doing, log.present
    threads = {thread.name: thread for thread in threading.enumerate()}
    saver = threads.get(SAVING) or threads.get(COMMITTING)  # the one that writes, else the one that waits for all
    loaders = multiprocessing.active_children() if doing is not None and doing[1].op is Op.LOAD else []
    numbers = sorted(segment.stages) if segment is not None else [launched_rank()]
    return ProcessStatus(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=machine(),
        start_time=start_time(os.getpid()),
        phase=phase,
        mark=f"{since} {doing[2] if doing else ''} {progress.num_pieces}",
        stages=[_stage_status(log, k, phase, since, doing, segment) for k in numbers],
        at=user_frame(threading.main_thread().ident),
        loaders=sorted((child.pid, state_of(child.pid)) for child in loaders if child.pid is not None),
        memory_bytes=_memory_bytes(log.device),
        saving=saver.name if saver else "",
        saving_at=user_frame(saver.ident) if saver else "",
        is_debugged=_is_debugged(),
        runs_ahead=log.runs_ahead,
    )


def _stage_status(
    log: ActivityLog,
    k: int,
    phase: str,
    since: float,
    present: tuple[int, Action, float] | None,
    segment: SegmentActivity | None,
) -> StageStatus:
    op, number, peers, now = None, 0, [], time.perf_counter()
    if present is not None and present[0] == k:
        (op, number, *_), since = present[1:]
        doing = f"{KINDS[op][1]} {number}"
        if (message := message_of(present[1], k, num_stages=log.num_stages)) is not None:
            peers = [message.receiver if op in LINKS else message.sender]
            doing += f" {'to' if op in LINKS else 'from'} stage {peers[0]}"
    elif present is not None:
        doing, peers = "wait for its turn", [present[0]]
    elif phase == IDLE:
        doing, peers = "wait for the next command", [COORDINATOR]
    elif phase == FINISHING:
        doing, peers = "wait for the last messages to leave", [n for n in (k - 1, k + 1) if 0 <= n < log.num_stages]
    else:
        doing = phase
    figures = {} if segment is None else _figures(segment, k, is_over=phase in (IDLE, FAILED), now=now)
    return StageStatus(
        stage=k, doing=doing, op=op, number=number, seconds=now - since, waits_for=peers, epoch=log.epoch, **figures
    )


def _figures(segment: SegmentActivity, k: int, *, is_over: bool, now: float) -> dict[str, Any]:
    """Return the figures of stage ``k``; rates are 0 after the segment."""
    elapsed, activity = max(now - segment.began, 1e-9), segment.stages[k]
    last, counts = dict(activity.last), {op: n for op, n in activity.counts.items() if n}
    # By counts, as numbers may go down (GPipe's gradients); and with islice, as a copy would grow with the epoch.
    num_backwards = sum(counts.get(op, 0) for op in BACKWARDS)
    num_through = num_backwards if segment.training else counts.get(Op.PREDICT, 0)
    return {
        "last": last,
        "counts": counts,
        "segment": segment.number,
        "update": activity.context.stage.version,
        "micro_batch": max((last[op] for op in FORWARDS if op in last), default=None),
        "images_per_second": 0.0 if is_over else sum(islice(activity.context.work.sizes, num_through)) / elapsed,
        "busy_share": 0.0 if is_over else activity.busy_seconds / elapsed,
        "staleness_mean": activity.staleness_sum / num_backwards if num_backwards else None,
    }


def _is_debugged() -> bool:
    """Return whether a debugger is active in any thread."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    return any(frame.f_trace is not None for frames in frames_of_threads().values() for frame in frames)


def _memory_bytes(device: torch.device) -> int:
    """Return the bytes allocated on a GPU, or the resident ones on a CPU."""
    if device.type == "cuda":  # by name, because each thread has its own current device
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def frames_of_threads() -> dict[int, list[FrameType]]:
    """Return the frames of each thread by its id, innermost first.

    No garbage is collected meanwhile. Python 3.11 makes an object for each frame, which may begin a collection; if a
    finalizer then lets the other thread leave that frame, the process can crash.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return {thread: [frame for frame, _ in walk_stack(top)] for thread, top in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def user_frame(thread: int | None) -> str:
    """Return a thread's innermost line outside of libraries, or ""."""
    frames = frames_of_threads().get(thread) if thread is not None else None
    if not frames:
        return ""
    frame = next((frame for frame in frames if not _is_library(frame.f_code.co_filename)), frames[0])
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith((TORCH, "<")) or (file.startswith(STANDARD_LIBRARY) and not file.startswith(PACKAGES))
