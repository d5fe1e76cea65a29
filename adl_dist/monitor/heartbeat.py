"""The watchdog's other end: answers it in every process, and sees in all but rank 0 whether rank 0 still asks."""

import logging
import threading
import time

from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.rpc_errors import PeerError, PeerGoneError
from adl_dist.distributed.world import launched_world_size
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.diagnosis import GONE, cause_of
from adl_dist.monitor.shutdown import end, exit_deadline, log_bounded, print_bounded
from adl_dist.monitor.status import CoordinatorStatus, ProcessStatus, RankStatus, kill, process_status
from adl_dist.monitor.timeouts import WatchdogTimeouts

ANSWER_SECONDS = 0.8  # the limit for one answer, which takes a few milliseconds
MAX_INTERVAL_SECONDS = 1.0  # between two looks
LOOKS_PER_STALL = 4


class Heartbeat:
    """The answers of one process to the watchdog on rank 0, and when that has asked last."""

    def __init__(self) -> None:
        self._activity = ActivityLog(launched_world_size() or 1)  # until the stages are built
        self._asked_at = time.monotonic()
        self._asker: ProcessStatus | None = None

    def answer(self, asker: ProcessStatus, *, closely: bool) -> ProcessStatus:
        """Return what this process does now; ``asker``: rank 0."""
        self._asked_at, self._asker = time.monotonic(), asker
        return process_status(self._activity, closely=closely)

    def activate(self, activity: ActivityLog) -> None:
        """Let ``activity`` answer from now on. Rank 0 may have asked before, and its name is kept."""
        activity.activate()
        self._activity, self._asked_at = activity, time.monotonic()

    def deactivate(self) -> None:
        """Answer no more for a job that is over, nor keep its tensors alive."""
        idle = ActivityLog(launched_world_size() or 1)
        idle.activate()
        self._activity = idle

    def silent_since(self, began: float) -> float:
        """Return for how many seconds rank 0 has not asked, counted from ``began`` at the earliest."""
        return time.monotonic() - max(self._asked_at, began)

    def rank0_status(self) -> str | None:
        """Describe rank 0 if it is known to be dead on this machine, else None."""
        asker = self._asker
        if asker is None or asker.machine == "" or asker.machine != machine() or not _is_dead(asker):
            return None
        return cause_of([RankStatus(rank=0, seen=asker, silent_seconds=1.0, state=GONE)], CoordinatorStatus()).text

    def describe_silence(self, seconds: float) -> str:
        """Describe that rank 0 has not asked for ``seconds``, and why as far as this process can see."""
        if self._asker is None:
            return (
                f"rank 0, which looks after the job, has not asked once in {seconds:.0f} s; it has ended or hangs "
                "between its meeting with the others and its first step, and its log, logs/rank0.log, may say why"
            )
        silent = RankStatus(rank=0, seen=self._asker, silent_seconds=seconds, state=state_of_silent(self._asker))
        cause = cause_of([silent], CoordinatorStatus()).text
        return f"rank 0, which looks after the job, has not asked for {seconds:.0f} s; {cause}"

    def kill_rank_0(self) -> None:
        """Kill rank 0 if it is on this machine: stopped or stuck, it would stay."""
        if self._asker is not None:
            kill(self._asker)


class HeartbeatMonitor:
    """A thread in every process but rank 0: ends the process when rank 0, which would see to that, asks no more."""

    def __init__(self, heartbeat: Heartbeat, rank: int, timeouts: WatchdogTimeouts) -> None:
        """Prepare for ``rank``, with the timeouts of the watchdog; rank 1 also reports a stall."""
        self._heartbeat, self._rank, self._timeouts = heartbeat, rank, timeouts
        self._interval = min(MAX_INTERVAL_SECONDS, timeouts.stall_seconds / LOOKS_PER_STALL)
        self._over = threading.Event()
        self._began = self._looked_at = time.monotonic()
        self._has_reported = False
        self._thread = threading.Thread(target=self._run, name="heartbeat monitor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        abort_seconds = self._timeouts.abort_after
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - self._looked_at > self._interval + 4 * ANSWER_SECONDS:  # it was this process that stood still
                self._began = now
            self._looked_at = now
            silent = self._heartbeat.silent_since(self._began)
            if abort_seconds is not None and silent >= abort_seconds + ANSWER_SECONDS:
                cause = self._heartbeat.describe_silence(silent)
                print_bounded(f"adl-dist: error: rank {self._rank} ends itself: {cause}", logging.ERROR)
                self._heartbeat.kill_rank_0()
                end()
            elif silent < self._timeouts.stall_seconds:
                self._has_reported = False
            elif not self._has_reported and self._rank == 1:
                self._has_reported = True
                print_bounded(f"adl-dist: {self._heartbeat.describe_silence(silent)}")


def end_because(why: str) -> None:
    """End this process soon, from a thread that returns first; rank 0 has printed ``why``."""

    def log_and_end() -> None:
        log_bounded(f"rank 0 ends the job: {why}", logging.ERROR)
        end()

    exit_deadline()
    threading.Thread(target=log_and_end, daemon=True).start()


def state_of_silent(seen: ProcessStatus | None, error: PeerError | None = None) -> str:
    """Return the state of a process that does not answer; see :class:`RankStatus`."""
    if seen is not None and seen.machine and seen.machine == machine():
        return GONE if _is_dead(seen) else state_of(seen.pid)
    return GONE if isinstance(error, PeerGoneError) else ""


def _is_dead(seen: ProcessStatus) -> bool:
    return start_time(seen.pid) != seen.start_time or state_of(seen.pid) == "Z"
