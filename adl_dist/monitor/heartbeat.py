"""The doctor's other end: answers it, in every process, and sees whether rank 0 still asks, in all but that one."""

import json
import logging
import threading
import time

from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.distributed.world import launched_world_size
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.diagnosis import GONE, cause_of
from adl_dist.monitor.shutdown import end, end_at_the_latest, log, say
from adl_dist.monitor.status import CoordinatorStatus, ProcessStatus, RankStatus, kill, process_status

ANSWER_SECONDS = 0.8  # of one question; an answer takes a few milliseconds
MOST_SECONDS_APART = 1.0  # of two looks
LOOKS_PER_STALL = 4
# What TensorPipe says when the other end has closed the connection or listens no more.
REFUSALS = ("ECONNRESET", "ECONNREFUSED", "EPIPE", "EOF")

_beacon = ActivityLog(launched_world_size() or 1)  # of this process, for those who ask from elsewhere
_asked: tuple[float, ProcessStatus | None] = (0.0, None)  # when rank 0 asked last, and who it is


def answer(question: str) -> str:
    """For rank 0 to call: what this process is at."""
    global _asked
    told = json.loads(question)
    _asked = (time.monotonic(), ProcessStatus.from_json(told["asker"]))
    return json.dumps(process_status(_beacon, closely=told["closely"]).to_json())


def abort(why: str) -> None:
    """For rank 0 to call, which has said why on standard error: end this process, after the answer to this."""
    end_at_the_latest()
    threading.Thread(target=_end_because, args=(why,), daemon=True).start()


def _end_because(why: str) -> None:
    log(f"rank 0 ends the job: {why}", logging.ERROR)
    end()


class HeartbeatMonitor:
    """In every other process: ends it when rank 0, which would see to that, has not asked for long."""

    def __init__(self, rank: int, *, stall_seconds: float, abort_seconds: float | None) -> None:
        """For ``rank``, with the limits of :class:`Watchdog`; the first of the deputies also speaks."""
        self._rank = rank
        self._stall_seconds, self._abort_seconds = stall_seconds, abort_seconds
        self._interval = min(MOST_SECONDS_APART, stall_seconds / LOOKS_PER_STALL)
        self._over = threading.Event()
        self._began = self._looked_at = time.monotonic()
        self._has_told = False
        self._thread = threading.Thread(target=self._run, name="doctor's deputy", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - self._looked_at > self._interval + 4 * ANSWER_SECONDS:  # it was this process that stood still
                self._began = now
            self._looked_at = now
            asked_at, asker = _asked
            still = now - max(asked_at, self._began)
            if self._abort_seconds is not None and still >= self._abort_seconds + ANSWER_SECONDS:
                say(f"adl-dist: error: rank {self._rank} ends itself: {_of_rank_0(asker, still)}", logging.ERROR)
                if asker is not None:
                    kill(asker)
                end()
            elif still < self._stall_seconds:
                self._has_told = False
            elif not self._has_told and self._rank == 1:
                self._has_told = True
                say(f"adl-dist: {_of_rank_0(asker, still)}")


def activate(beacon: ActivityLog) -> None:
    """Let ``beacon`` answer those who ask this process from now on."""
    global _beacon, _asked
    beacon.activate()
    # Rank 0 may have asked before, and might be stopped before it asks again: its name must not be lost.
    _beacon, _asked = beacon, (time.monotonic(), _asked[1])


def deactivate() -> None:
    """Answer no more for a job that is over, nor keep its tensors alive."""
    global _beacon
    idle = ActivityLog(launched_world_size() or 1)
    idle.activate()
    _beacon = idle


def rank0_status() -> str | None:
    """For a process that waits in vain: a line about rank 0 if that is gone, as far as can be seen from here."""
    asker = _asked[1]
    if asker is None or asker.machine == "" or asker.machine != machine() or not _is_dead(asker):
        return None
    return cause_of([RankStatus(rank=0, seen=asker, silent_seconds=1.0, state=GONE)], CoordinatorStatus()).text


def _of_rank_0(asker: ProcessStatus | None, still: float) -> str:
    if asker is None:
        return (
            f"rank 0, which looks after the job, has not asked once in {still:.0f} s; it has ended or hangs between "
            "its meeting with the others and its first step, and its log, logs/rank0.log, may say why"
        )
    silent = RankStatus(rank=0, seen=asker, silent_seconds=still, state=state_of_silent(asker, RuntimeError()))
    said = cause_of([silent], CoordinatorStatus()).text
    return f"rank 0, which looks after the job, has not asked for {still:.0f} s; {said}"


def state_of_silent(seen: ProcessStatus | None, error: RuntimeError) -> str:
    """Of a process that does not answer; see :class:`RankStatus`."""
    if seen is not None and seen.machine and seen.machine == machine():
        return GONE if _is_dead(seen) else state_of(seen.pid)
    return GONE if any(word in str(error) for word in REFUSALS) else ""


def _is_dead(seen: ProcessStatus) -> bool:
    return start_time(seen.pid) != seen.start_time or state_of(seen.pid) == "Z"
