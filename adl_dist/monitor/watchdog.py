"""The watchdog: detects a stall, prints its cause, and ends the job.

On rank 0 a thread asks all processes about once a second for their status, over the control plane. Any change in any
answer is progress. After ``stall_seconds`` without progress it prints one picture on standard error, and after
``abort_seconds`` it ends the job. Every other process has a heartbeat monitor, which checks that rank 0 asks.

Disks, readers of the output and threads may hang too, so work that may wait for them runs in second threads, with a
time limit.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.rpc_errors import PeerError, PeerGoneError
from adl_dist.monitor.activity import FAILED, IDLE, ActivityLog
from adl_dist.monitor.diagnosis import GONE, cause_of, describe_silence, picture
from adl_dist.monitor.status import CoordinatorStatus, ProcessStatus, RankStatus, process_status
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.report import tell

logger = logging.getLogger("adl_dist")

MAX_INTERVAL_SECONDS = 1.0  # between two checks
LOOKS_PER_STALL = 4
# Limits for one answer, which takes a few milliseconds, and for that of a process that did not answer the last time.
ANSWER_SECONDS, AGAIN_SECONDS = 0.8, 0.2
GRACE_SECONDS = 0.2  # for the answer to the last message to leave
PRINT_SECONDS = 0.5  # limit for writing a line
END_SECONDS = 5.0  # limit for an exit, whatever hangs
MARGIN_SECONDS = 5.0  # for the end of a job, in addition to the wait for a save

# Returns the status of the processes whose limits in seconds are given; the second is rank 0's own.
AskPeers = Callable[[Mapping[int, float], ProcessStatus], Mapping[int, ProcessStatus | PeerError]]


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
        """Answer from ``activity``; without one, forget the job that is over."""
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
        """Wait up to ``timeout`` seconds for the thread to end after :meth:`stop`."""
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


class Watchdog(PollingThread):
    """The thread on rank 0 that supervises the job."""

    def __init__(
        self,
        num_processes: int,
        activity: ActivityLog,
        coordination: Callable[[], CoordinatorStatus],
        timeouts: WatchdogTimeouts,
        *,
        ask_peers: AskPeers,
        abort_peers: Callable[[str], None],
        on_gone: Callable[[int, str], None],
        on_end: Callable[[], None],
    ) -> None:
        """Create the thread.

        Args:
            num_processes: number of processes of the job, including this one.
            activity: the record of this process.
            coordination: returns the coordinator's status.
            timeouts: the limits on a standstill.
            ask_peers: returns the status of other processes.
            abort_peers: takes the reason, tells all others to exit, and waits for them.
            on_gone: takes the rank of a process that is gone, and a line that names it.
            on_end: called right before the end of the job.
        """
        super().__init__("watchdog", timeouts, distributed=num_processes > 1)
        self._activity, self._coordination = activity, coordination
        self._ask_peers, self._abort_peers, self._on_gone, self._on_end = ask_peers, abort_peers, on_gone, on_end
        self._asking = threading.Lock()
        self._ranks = {rank: RankStatus(rank=rank) for rank in range(num_processes)}
        self._changed_at = time.monotonic()
        self._heard_at = dict.fromkeys(self._ranks, self._changed_at)
        self._marks: tuple[Any, ...] = ()

    def statuses(self) -> list[RankStatus]:
        """Return the present or last known status of all processes."""
        with self._asking:
            own = process_status(self._activity)
            limits = {
                rank: AGAIN_SECONDS if known.silent_seconds else ANSWER_SECONDS
                for rank, known in self._ranks.items()
                if rank and known.state != GONE
            }
            answers = {0: own, **self._ask_peers(limits, own)}
            now = time.monotonic()
            for rank, answer in answers.items():
                if isinstance(answer, ProcessStatus):
                    self._heard_at[rank] = now
                    self._ranks[rank] = RankStatus(rank=rank, seen=answer)
                else:
                    seen, silent = self._ranks[rank].seen, now - self._heard_at[rank]
                    state = state_of_silent(seen, answer)
                    self._ranks[rank] = RankStatus(rank=rank, seen=seen, silent_seconds=silent, state=state)
            return list(self._ranks.values())

    def cause(self) -> str | None:
        """Return a text on the process that holds up the others, or None."""
        cause = cause_of(self.statuses(), self._coordination())
        return cause.text if cause.rank is not None else None

    def look(self) -> None:
        """Check for progress; report a stall, and end the job if it lasts."""
        statuses, coordination = self.statuses(), self._coordination()
        now = time.monotonic()
        if self._over.is_set():
            return
        if self.was_held(now):
            self._changed_at = now
        for known in statuses:
            if known.state == GONE:
                self.stop()
                self._on_gone(known.rank, describe_silence(known))
                return
        marks = (coordination.command, coordination.is_waiting, *(s.seen and s.seen.mark for s in statuses))
        if marks != self._marks:
            if self._has_reported:
                print_bounded(f"adl-dist: continuing after {now - self._changed_at:.0f} s without progress")
            self._marks, self._changed_at, self._has_reported = marks, now, False
            return
        still = now - self._changed_at
        # If a stage has failed, first let its save end and its error appear.
        has_failed = any(known.seen and known.seen.phase == FAILED for known in statuses)
        grace = LAST_SAVE_SECONDS + MARGIN_SECONDS if has_failed else 0.0
        if self._abort_seconds is not None and still >= self._abort_seconds + grace:
            self._end(still, statuses, coordination)
        elif still >= self._stall_seconds and not self._has_reported:
            self._has_reported = True
            then = f"; after {self._abort_seconds:g} s the job is ended" if self._abort_seconds is not None else ""
            print_bounded(
                f"adl-dist: no progress in {still:.1f} s (runtime.watchdog_warn_seconds={self._stall_seconds:g})"
                f"{then}\n{picture(statuses, coordination)}\nlikely cause: {cause_of(statuses, coordination).text}"
            )

    def _end(self, still: float, statuses: Sequence[RankStatus], coordination: CoordinatorStatus) -> None:
        if any(known.seen and known.seen.is_debugged for known in statuses):
            return
        exit_deadline()
        cause = cause_of(statuses, coordination)
        why = f"no progress in {still:.1f} s (runtime.watchdog_abort_seconds={self._abort_seconds:g}): {cause.text}"
        print_bounded(f"adl-dist: error: {why}; the same command resumes from the last checkpoint", logging.ERROR)
        for known in statuses[1:]:
            # Before any wait: the launcher ends this process as soon as another one has ended.
            if known.seen and known.silent_seconds:
                kill(known.seen)
        self._abort_peers(why)
        run_bounded(PRINT_SECONDS, self._on_end)  # it removes a file
        end()


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
        """Return the message that rank 0 stopped asking, with any known cause."""
        asker = self._heartbeat.asker
        if asker is None:
            return (
                f"rank 0, which looks after the job, has not asked once in {seconds:.0f} s; it has ended or hangs "
                "between its meeting with the others and its first step, and its log, logs/rank0.log, may say why"
            )
        why = describe_silence(RankStatus(rank=0, seen=asker, state=state_of_silent(asker)))
        return f"rank 0, which looks after the job, has not asked for {seconds:.0f} s; {why}"


def state_of_silent(seen: ProcessStatus | None, error: PeerError | None = None) -> str:
    """Return the state of a silent process; see :class:`RankStatus`."""
    if seen is not None and seen.machine == machine() != "":
        state = state_of(seen.pid)
        return GONE if start_time(seen.pid) != seen.start_time or state == "Z" else state
    return GONE if isinstance(error, PeerGoneError) else ""


def kill(seen: ProcessStatus) -> None:
    """Kill a silent process, which would remain, if it is on this machine."""
    if seen.machine == machine() != "" and start_time(seen.pid) == seen.start_time:
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)


def run_bounded(seconds: float, do: Callable[[], None]) -> None:
    """Call ``do`` in a second thread; wait for it at most ``seconds``."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)


def print_bounded(text: str, level: int = logging.WARNING) -> None:
    """Print ``text`` on standard error, then log it, within a time limit."""
    run_bounded(PRINT_SECONDS, lambda: tell(sys.stderr, text + "\n"))
    log_bounded(text, level)


def log_bounded(text: str, level: int) -> None:
    """Write ``text`` into this process's log, within a time limit."""
    if logger.hasHandlers():  # without any, logging would write to standard error by itself
        run_bounded(PRINT_SECONDS, lambda: logger.log(level, "%s", text))


def exit_deadline() -> None:
    """Exit with code 1 after ``END_SECONDS``, unless ended before."""
    timer = threading.Timer(END_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end() -> None:
    """Exit with code 1, even if the main thread waits for something."""
    exit_deadline()
    time.sleep(GRACE_SECONDS)
    run_bounded(PRINT_SECONDS, _flush)
    os._exit(1)


def _flush() -> None:
    for handler in logger.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        tell(stream, "")


def end_because(why: str) -> None:
    """End this process soon, in a second thread; rank 0 has printed ``why``."""

    def log_and_end() -> None:
        log_bounded(f"rank 0 ends the job: {why}", logging.ERROR)
        end()

    threading.Thread(target=log_and_end, daemon=True).start()
