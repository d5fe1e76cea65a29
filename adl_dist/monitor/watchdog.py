"""The watchdog: detects a stall, prints its cause, and ends the job.

On rank 0 a thread asks all processes about once a second for their status (heartbeat.py), over the control plane. Any
change in any answer is progress. After ``stall_seconds`` without progress it prints one picture on standard error, and
after ``abort_seconds`` it ends the job. Every other process has a heartbeat monitor, which checks that rank 0 asks.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.distributed.rpc_errors import PeerError
from adl_dist.monitor.activity import FAILED, ActivityLog
from adl_dist.monitor.diagnosis import GONE, cause_of, describe_silence, picture
from adl_dist.monitor.heartbeat import ANSWER_SECONDS, PollingThread, kill, state_of_silent
from adl_dist.monitor.shutdown import PRINT_SECONDS, end, exit_deadline, print_bounded, run_bounded
from adl_dist.monitor.status import CoordinatorStatus, ProcessStatus, RankStatus, process_status
from adl_dist.monitor.timeouts import WatchdogTimeouts

AGAIN_SECONDS = 0.2  # limit for an answer of a process that did not answer the last time
MARGIN_SECONDS = 5.0  # for the end of a job, in addition to the wait for a save


# Returns the status of the processes whose limits in seconds are given; the second is rank 0's own.
AskPeers = Callable[[Mapping[int, float], ProcessStatus], Mapping[int, ProcessStatus | PeerError]]


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
            num_processes: of the job, including this one.
            activity: the record of this process.
            coordination: returns the coordinator's status.
            timeouts: the limits on a standstill.
            ask_peers: returns the status of other processes.
            abort_peers: tells all others why they are to exit, and waits for them.
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
        """Return the name of the process that holds up the others, or None."""
        cause = cause_of(self.statuses(), self._coordination())
        return cause.text if cause.rank is not None else None

    def look(self) -> None:
        """Check whether the status of any process has changed."""
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
