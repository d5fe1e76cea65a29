"""Looks after a running job from beside it: sees that it stalls, says why, and ends it before it hangs for ever.

On rank 0 a thread asks all processes about once a second what they are at (status.py), over RPC. Progress is any
change of what any of them tells. After ``stall_seconds`` without it there is one picture on standard error, and after
``abort_seconds`` the job ends. Every other process has a deputy, which sees whether rank 0 still asks.
"""

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed.rpc as rpc

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.distributed.world import World, name_of
from adl_dist.monitor.activity import FAILED, ActivityLog
from adl_dist.monitor.diagnosis import GONE, Cause, cause_of, picture
from adl_dist.monitor.heartbeat import (
    ANSWER_SECONDS,
    LOOKS_PER_STALL,
    MOST_SECONDS_APART,
    abort,
    answer,
    state_of_silent,
)
from adl_dist.monitor.shutdown import SPEAK_SECONDS, end, end_at_the_latest, log, say, within
from adl_dist.monitor.status import CoordinatorStatus, ProcessStatus, RankStatus, kill, process_status

AGAIN_SECONDS = 0.2  # of a question to a process that has not answered the one before
ASIDE_SECONDS = 5.0  # that an end takes beside the wait for a save


class Watchdog:
    """On rank 0."""

    def __init__(
        self,
        world: World,
        beacon: ActivityLog,
        coordination: Callable[..., CoordinatorStatus],
        *,
        stall_seconds: float,
        abort_seconds: float | None,
        on_gone: Callable[[int, str], None],
        on_end: Callable[[], None],
    ) -> None:
        """Prepare; see :meth:`start`.

        Args:
            world: of all processes.
            beacon: of this one.
            coordination: what the coordinator is at; ``closely=True``: also where in its program.
            stall_seconds: without progress until the picture is printed.
            abort_seconds: without progress until the job is ended; None: never.
            on_gone: takes the rank of a process that is gone, and a line that names it.
            on_end: called right before the job is ended.
        """
        self._world, self._beacon, self._coordination = world, beacon, coordination
        self._stall_seconds, self._abort_seconds = stall_seconds, abort_seconds
        self._on_gone, self._on_end = on_gone, on_end
        self._interval = min(MOST_SECONDS_APART, stall_seconds / LOOKS_PER_STALL)
        self._over = threading.Event()
        self._asking = threading.Lock()
        now = time.monotonic()
        self._members = {rank: RankStatus(rank=rank) for rank in range(world.size)}
        self._heard_at = dict.fromkeys(self._members, now)
        self._marks: tuple[Any, ...] = ()
        self._changed_at = self._looked_at = now
        self._has_told = False
        self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns at once. What happens to other processes from now on is no news."""
        self._over.set()

    def join(self) -> None:
        """After :meth:`stop`, wait until the last question is answered or given up."""
        self._thread.join(timeout=2 * ANSWER_SECONDS)

    def statuses(self, *, closely: bool) -> list[RankStatus]:
        """All processes as they are now; one that does not answer, as it was last seen."""
        with self._asking:
            told = self._ask(closely)
            now = time.monotonic()
            for rank, heard in told.items():
                before = self._members[rank]
                if isinstance(heard, ProcessStatus):
                    self._heard_at[rank] = now
                    self._members[rank] = RankStatus(rank=rank, seen=heard)
                else:
                    silent = now - self._heard_at[rank]
                    state = state_of_silent(before.seen, heard)
                    self._members[rank] = RankStatus(rank=rank, seen=before.seen, silent_seconds=silent, state=state)
            return list(self._members.values())

    def cause(self) -> str | None:
        """Who holds up the others, by name; None: no process in particular."""
        cause = cause_of(self.statuses(closely=True), self._coordination(closely=True))
        return cause.text if cause.rank is not None else None

    def _ask(self, closely: bool) -> dict[int, ProcessStatus | RuntimeError]:
        own = process_status(self._beacon, closely=closely)
        told: dict[int, ProcessStatus | RuntimeError] = {0: own}
        question = json.dumps({"closely": closely, "asker": own.to_json()})
        asked: dict[int, Any] = {}
        for rank, member in self._members.items():
            if rank and member.state != GONE:
                seconds = AGAIN_SECONDS if member.silent_seconds else ANSWER_SECONDS
                try:
                    asked[rank] = rpc.rpc_async(name_of(rank), answer, args=(question,), timeout=seconds)
                except RuntimeError as error:
                    told[rank] = error
        for rank, future in asked.items():
            try:
                told[rank] = ProcessStatus.from_json(json.loads(future.wait()))
            except RuntimeError as error:
                told[rank] = error
        return told

    def _run(self) -> None:
        has_failed = False
        while not self._over.is_set():
            try:
                self._look()
            except Exception as error:
                # It goes on: without questions of rank 0 the deputies would take a healthy job for a dead one.
                if not has_failed:
                    log(f"the doctor could not look:\n{''.join(traceback.format_exception(error))}", logging.ERROR)
                has_failed = True
            self._over.wait(self._interval)

    def _look(self) -> None:
        statuses = self.statuses(closely=False)
        now = time.monotonic()
        if self._over.is_set():
            return
        if now - self._looked_at > self._interval + 4 * ANSWER_SECONDS:  # it was this process that stood still
            self._changed_at = now
        self._looked_at = now
        for member in statuses:
            if member.state == GONE:
                self.stop()
                self._on_gone(member.rank, cause_of([member], CoordinatorStatus()).text)
                return
        coordination = self._coordination()
        marks = (coordination.command, coordination.is_waiting, *(m.seen and m.seen.mark for m in statuses))
        if marks != self._marks:
            if self._has_told:
                say(f"adl-dist: going on, after {now - self._changed_at:.0f} s without progress")
            self._marks, self._changed_at, self._has_told = marks, now, False
            return
        still = now - self._changed_at
        if self._abort_seconds is not None and still >= self._abort_seconds + self._grace(statuses):
            self._end(still)
        elif still >= self._stall_seconds and not self._has_told:
            self._has_told = True
            self._tell(still)

    def _grace(self, statuses: Sequence[RankStatus]) -> float:
        """Of a job that ends by itself, with an error that is more telling, once a save under way has had its time."""
        return LAST_SAVE_SECONDS + ASIDE_SECONDS if any(m.seen and m.seen.phase == FAILED for m in statuses) else 0.0

    def _tell(self, still: float) -> None:
        statuses, coordination = self.statuses(closely=True), self._coordination(closely=True)
        cause = cause_of(statuses, coordination)
        end = f"; after {self._abort_seconds:g} s the job is ended" if self._abort_seconds is not None else ""
        say(
            f"adl-dist: no progress in {still:.1f} s (runtime.stall_seconds={self._stall_seconds:g}){end}\n"
            f"{picture(statuses, coordination)}\nlikely cause: {cause.text}"
        )

    def _end(self, still: float) -> None:
        statuses = self.statuses(closely=True)
        if any(member.seen and member.seen.is_debugged for member in statuses):
            return  # whoever stands there wants to look around
        end_at_the_latest()
        cause: Cause = cause_of(statuses, self._coordination(closely=True))
        why = f"no progress in {still:.1f} s (runtime.abort_seconds={self._abort_seconds:g}): {cause.text}"
        say(f"adl-dist: error: {why}; the same command goes on from the last checkpoint", logging.ERROR)
        told = []
        for member in statuses[1:]:
            with suppress(RuntimeError):
                told.append(rpc.rpc_async(name_of(member.rank), abort, args=(why,), timeout=ANSWER_SECONDS))
        for member in statuses[1:]:
            # Before anything is waited for: the launcher ends this process as soon as another one has ended.
            if member.seen and member.silent_seconds:
                kill(member.seen)
        for future in told:
            with suppress(RuntimeError):
                future.wait()
        within(SPEAK_SECONDS, self._on_end)  # it removes a file
        end()
