"""The watchdog's other end: answers it, and checks that rank 0 asks."""

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.rpc_errors import PeerError, PeerGoneError
from adl_dist.monitor.activity import IDLE, ActivityLog
from adl_dist.monitor.diagnosis import GONE, describe_silence
from adl_dist.monitor.shutdown import end, exit_deadline, log_bounded, print_bounded
from adl_dist.monitor.status import ProcessStatus, RankStatus, process_status
from adl_dist.monitor.timeouts import WatchdogTimeouts

ANSWER_SECONDS = 0.8  # limit for one answer, which takes a few milliseconds
MAX_INTERVAL_SECONDS = 1.0  # between two checks
LOOKS_PER_STALL = 4


class Heartbeat:
    """The answers of one process to the watchdog on rank 0."""

    def __init__(self) -> None:
        self._activity = ActivityLog(1)  # until the stages are built
        self.asked_at = time.monotonic()  # time of rank 0's last question, or when the stages were built
        self.asker: ProcessStatus | None = None  # rank 0 at its last question, if any

    def answer(self, asker: ProcessStatus) -> ProcessStatus:
        """Return the status of this process to the ``asker``, rank 0."""
        self.asked_at, self.asker = time.monotonic(), asker
        return process_status(self._activity)

    def activate(self, activity: ActivityLog | None) -> None:
        """Answer from ``activity``, or forget that of a job that is over."""
        self._activity, self.asked_at = activity or ActivityLog(1), time.monotonic()
        self._activity.enter(IDLE)

    def rank0_status(self) -> str | None:
        """Return a description of rank 0 if it is known to be dead, or None."""
        if self.asker is None or state_of_silent(self.asker) != GONE:
            return None
        return describe_silence(RankStatus(rank=0, seen=self.asker, state=GONE))


class PollingThread(threading.Thread):
    """A thread that checks at regular times whether the job makes progress."""

    def __init__(self, name: str, timeouts: WatchdogTimeouts, *, distributed: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._stall_seconds = timeouts.stall_seconds
        self._abort_seconds = timeouts.abort_after(distributed=distributed)
        self._interval = min(MAX_INTERVAL_SECONDS, timeouts.stall_seconds / LOOKS_PER_STALL)
        self._over = threading.Event()
        self._looked_at = time.monotonic()
        self._has_reported = False

    def stop(self) -> None:
        """Stop checking; return at once."""
        self._over.set()

    def join(self, timeout: float | None = 2 * ANSWER_SECONDS) -> None:
        """Wait for the end of the last check after :meth:`stop`, or ``timeout``."""
        super().join(timeout)

    def look(self) -> None:
        """Check once."""
        raise NotImplementedError

    def was_held(self, now: float) -> bool:
        """Return whether this process itself stood still since the last check."""
        seconds, self._looked_at = now - self._looked_at, now
        return seconds > self._interval + 4 * ANSWER_SECONDS

    def run(self) -> None:
        """Check at a fixed interval until :meth:`stop`."""
        has_failed = False
        while not self._over.is_set():
            try:
                self.look()
            except Exception as error:
                # It continues: if rank 0 stopped asking, the others would take a healthy job for a dead one.
                if not has_failed:
                    trace = "".join(traceback.format_exception(error))
                    log_bounded(f"the {self.name} could not look:\n{trace}", logging.ERROR)
                has_failed = True
            self._over.wait(self._interval)


class HeartbeatMonitor(PollingThread):
    """A thread that ends its process if rank 0 stops asking."""

    def __init__(
        self, heartbeat: Heartbeat, rank: int, timeouts: WatchdogTimeouts, on_gone: Callable[[str], None]
    ) -> None:
        """Create the thread of ``rank``; rank 1 also reports a stall.

        ``on_gone`` is called once, when rank 0 is known to be dead, with its description.
        """
        super().__init__("heartbeat monitor", timeouts, distributed=True)
        self._heartbeat, self._rank, self._began = heartbeat, rank, time.monotonic()
        self._on_gone: Callable[[str], None] | None = on_gone

    def look(self) -> None:
        """Check that rank 0 is alive and has asked in time."""
        if self._on_gone is not None and (gone := self._heartbeat.rank0_status()) is not None:
            on_gone, self._on_gone = self._on_gone, None
            on_gone(gone)
        now = time.monotonic()
        if self.was_held(now):
            self._began = now
        silent = now - max(self._heartbeat.asked_at, self._began)
        if self._abort_seconds is not None and silent >= self._abort_seconds + ANSWER_SECONDS:
            print_bounded(f"adl-dist: error: rank {self._rank} ends itself: {self._cause(silent)}", logging.ERROR)
            if self._heartbeat.asker is not None:
                kill(self._heartbeat.asker)
            end()
        elif silent < self._stall_seconds:
            self._has_reported = False
        elif not self._has_reported and self._rank == 1:
            self._has_reported = True
            print_bounded(f"adl-dist: {self._cause(silent)}")

    def _cause(self, seconds: float) -> str:
        """Return a text that rank 0 has not asked, with the known reason."""
        asker = self._heartbeat.asker
        if asker is None:
            return (
                f"rank 0, which looks after the job, has not asked once in {seconds:.0f} s; it has ended or hangs "
                "between its meeting with the others and its first step, and its log, logs/rank0.log, may say why"
            )
        why = describe_silence(RankStatus(rank=0, seen=asker, state=state_of_silent(asker)))
        return f"rank 0, which looks after the job, has not asked for {seconds:.0f} s; {why}"


def end_because(why: str) -> None:
    """End this process soon, in a second thread; rank 0 has printed ``why``."""

    def log_and_end() -> None:
        log_bounded(f"rank 0 ends the job: {why}", logging.ERROR)
        end()

    exit_deadline()
    threading.Thread(target=log_and_end, daemon=True).start()


def state_of_silent(seen: ProcessStatus | None, error: PeerError | None = None) -> str:
    """Return the state of a silent process; see :class:`RankStatus`."""
    if seen is not None and seen.machine == machine() != "":
        state = state_of(seen.pid)
        return GONE if start_time(seen.pid) != seen.start_time or state == "Z" else state
    return GONE if isinstance(error, PeerGoneError) else ""


def kill(seen: ProcessStatus) -> None:
    """Kill a silent process of this machine, which would remain."""
    if seen.machine == machine() != "" and start_time(seen.pid) == seen.start_time:
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)
