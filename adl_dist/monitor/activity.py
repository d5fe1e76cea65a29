"""What this process does now, written down as it goes and read from beside.

The main thread writes: one tuple and one dictionary entry per action, with no lock. Whoever asks, a thread of RPC or
of rank 0 itself, reads these plain attributes and works out the rest.
"""

import multiprocessing
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from adl_dist.checkpoint.async_save import COMMITTING, SAVING
from adl_dist.checkpoint.layout import progress
from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.world import launched_rank
from adl_dist.engine import StageContext
from adl_dist.monitor.status import (
    AWAITING,
    COORDINATOR,
    FAILED,
    IDLE,
    STARTING,
    ProcessStatus,
    StageStatus,
)
from adl_dist.monitor.trace import KINDS
from adl_dist.schedule import Action, Op, Segment
from adl_dist.schedule.actions import LINKS, RECEIVES

CPU = torch.device("cpu")
FINISHING = "finishing"  # all actions are done, and what was sent last has yet to leave
FORWARDS = (Op.FORWARD, Op.FORWARD_ONLY, Op.PREDICT)
# Where a process hangs is told by the line that called into these.
LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib"))
OTHER_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Totals(Protocol):
    """Sums of what a stage counted in the groups of the segment that it has finished."""

    def result(self) -> dict[str, float]:
        """``busy_seconds``, ``staleness_sum``, ``num_backwards``."""
        ...


class ActivityRecorder:
    """Of the stages of one process."""

    def __init__(self, num_stages: int, *, device: torch.device = CPU, runs_ahead: bool = False) -> None:
        """For ``num_stages`` in all, that compute on ``device``; ``runs_ahead``: see :class:`ProcessStatus`."""
        self._num_stages, self._device, self._runs_ahead = num_stages, device, runs_ahead
        self._num_segments = self._epoch = 0
        self._phase = (STARTING, time.monotonic())
        self._doing: tuple[int, Action, float] | None = None
        self._last: dict[int, dict[Op, int]] = {}
        self._counts: dict[int, dict[Op, int]] = {}
        self._seats: Mapping[int, StageContext] = {}
        self._totals: Mapping[int, Totals] = {}
        self._segment: Segment | None = None
        self._began = time.monotonic()

    def activate(self) -> None:
        """From now on commands are awaited."""
        self._phase = (IDLE, time.monotonic())

    @contextmanager
    def during(self, command: str) -> Iterator[None]:
        """Be in the phase ``command`` while inside."""
        self._phase = (command, time.monotonic())
        try:
            yield
        except BaseException:
            self._doing = None
            self._phase = (FAILED, time.monotonic())
            raise
        self._doing = None
        self._phase = (IDLE, time.monotonic())

    def followed(
        self,
        order: Iterable[tuple[int, Action]],
        contexts: Mapping[int, StageContext],
        segment: Segment,
        totals: Mapping[int, Totals],
    ) -> Iterator[tuple[int, Action]]:
        """Hand ``order`` through, and keep up with whoever takes it and carries it out."""
        self._seats, self._segment, self._totals = contexts, segment, totals
        last: dict[int, dict[Op, int]] = {k: {} for k in contexts}
        counts: dict[int, dict[Op, int]] = {k: {} for k in contexts}
        self._last, self._counts = last, counts
        self._num_segments += 1
        if totals:  # evaluation is of no epoch of its own
            self._epoch = segment.epoch
        now = time.monotonic
        self._began = now()
        for k, action in order:
            self._doing = (k, action, now())
            yield k, action
            op, of_stage = action.op, counts[k]
            last[k][op] = action.number
            of_stage[op] = of_stage.get(op, 0) + 1
        self._doing = None
        self._phase = (FINISHING, now())

    def tell(self, *, closely: bool = False) -> ProcessStatus:
        """What this process is at, as of now; ``closely``: also where in its program."""
        now = time.monotonic()
        # Each read once: the main thread goes on meanwhile.
        (phase, since), doing = self._phase, self._doing
        saver = _saver()
        return ProcessStatus(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=machine(),
            start_time=start_time(os.getpid()),
            phase=phase,
            seconds=now - since,
            mark=f"{since} {doing[2] if doing else ''} {progress.num_pieces}",
            stages=[self._tell_of(k, phase, since, doing, now) for k in sorted(self._seats)]
            or [self._before_segments(phase, now - since)],
            at=user_frame(threading.main_thread().ident) if closely else "",
            loaders=_loaders() if closely and doing is not None and doing[1].op is Op.LOAD else [],
            memory_bytes=_memory_bytes(self._device),
            saving=saver.name if saver else "",
            saving_at=user_frame(saver.ident) if closely and saver else "",
            is_debugged=closely and _is_debugged(),
            runs_ahead=self._runs_ahead,
        )

    def _before_segments(self, phase: str, seconds: float) -> StageStatus:
        if phase == IDLE:
            return StageStatus(stage=launched_rank(), doing=AWAITING, seconds=seconds, waits_for=[COORDINATOR])
        return StageStatus(stage=launched_rank(), doing=phase, seconds=seconds)

    def _tell_of(
        self, k: int, phase: str, since: float, doing: tuple[int, Action, float] | None, now: float
    ) -> StageStatus:
        segment, context = self._segment, self._seats[k]
        last, counts = dict(self._last.get(k, {})), dict(self._counts.get(k, {}))
        assert segment is not None, "seats and segment are set together"
        sums = self._totals[k].result() if k in self._totals else {"num_backwards": 0, "busy_seconds": 0.0}
        elapsed = max(now - self._began, 1e-9)
        through = Op.BACKWARD if k in self._totals else Op.PREDICT
        # Counted, as numbers may go down (GPipe's gradients do); and not sliced: the copy would grow with the epoch.
        num_samples = sum(islice(context.work.sizes, counts.get(through, 0)))
        is_over = phase in (IDLE, FAILED)
        what, op, number, from_when, waits_for = phase, "", 0, since, []
        if doing is not None and doing[0] == k:
            (op_, number), from_when = doing[1], doing[2]
            peers = waits_for = self._peers(k, op_)
            op, what = op_.value, f"{KINDS[op_][1]} {number}"
            if peers:
                what += f" {'from' if op_ in RECEIVES else 'to'} stage {peers[0]}"
        elif doing is not None:
            what, waits_for = "wait for its turn", [doing[0]]
        elif phase == IDLE:
            what, waits_for = AWAITING, [COORDINATOR]
        elif phase == FINISHING:
            what, waits_for = (
                "wait for the last messages to leave",
                [n for n in (k - 1, k + 1) if 0 <= n < self._num_stages],
            )
        return StageStatus(
            stage=k,
            doing=what,
            op=op,
            number=number,
            seconds=now - from_when,
            waits_for=waits_for,
            last={o.value: n for o, n in last.items()},
            counts={o.value: n for o, n in counts.items()},
            segment=self._num_segments,
            epoch=self._epoch,
            update=context.stage.version,
            micro_batch=max((last[o] for o in FORWARDS if o in last), default=None),
            images_per_second=0.0 if is_over else num_samples / elapsed,
            busy_share=0.0 if is_over else sums["busy_seconds"] / elapsed,
            staleness_mean=sums["staleness_sum"] / sums["num_backwards"] if sums["num_backwards"] else None,
        )

    def _peers(self, k: int, op: Op) -> list[int]:
        if op in LINKS:
            hop = LINKS[op].hop
            return [self._num_stages - 1 if hop is None else k + hop]
        if op in RECEIVES:
            hop = RECEIVES[op].hop
            return [0 if hop is None else k - hop]
        return []


def kill(seen: ProcessStatus) -> None:
    """Kill a process that does not answer, if it is of this machine: stopped or stuck, it would stay."""
    if seen.machine == machine() != "" and start_time(seen.pid) == seen.start_time:
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)


def _loaders() -> list[tuple[int, str]]:
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    return [(pid, state_of(pid)) for pid in sorted(children)]


def _saver() -> threading.Thread | None:
    """The thread that saves beside training; that which writes before that which waits for all to have written."""
    by_name = {thread.name: thread for thread in threading.enumerate()}
    return by_name.get(SAVING) or by_name.get(COMMITTING)


def _is_debugged() -> bool:
    """Whether a debugger follows any thread. ``sys.gettrace`` would tell of the one that asks only."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12, and debuggers begin to use it
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_trace is not None:
                return True
            frame = frame.f_back
    return False


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":  # named: whoever asks is a thread of its own, whose current device is another
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def user_frame(thread: int | None) -> str:
    """Where the thread with that identity is in the program: its innermost line that is not a library's."""
    frame = innermost = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    # The packages lie inside of the standard library's folder.
    if file.startswith(LIBRARIES[0]) or file.startswith("<"):
        return True
    return file.startswith(LIBRARIES[1]) and not file.startswith(OTHER_PACKAGES)
