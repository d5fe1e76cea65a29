"""Looks after a running job from beside it: sees that it stalls, says why, and ends it before it hangs for ever.

On rank 0 a thread asks all processes about once a second what they are at (beacon.py), over RPC. Progress is any
change of what any of them tells. After ``stall_seconds`` without it there is one picture on standard error, and after
``abort_seconds`` the job ends. Every other process has a deputy, which sees whether rank 0 still asks.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed.rpc as rpc

from adl_dist.runtime.beacon import Beacon, born, kill, machine, state_of
from adl_dist.runtime.diagnosis import GONE, Cause, cause_of, picture
from adl_dist.runtime.sighting import Coordination, Member, Sighting
from adl_dist.runtime.world import World, launched_world_size, name_of

logger = logging.getLogger("adl_dist")

ANSWER_SECONDS = 0.8  # of one question; an answer takes a few milliseconds
AGAIN_SECONDS = 0.2  # of one to a process that has not answered the question before
MOST_SECONDS_APART = 1.0  # of two looks
LOOKS_PER_STALL = 4
GRACE_SECONDS = 0.2  # in which the answer to the last word leaves, and logs are written
# What TensorPipe says when the other end has closed the connection or listens no more.
REFUSALS = ("ECONNRESET", "ECONNREFUSED", "EPIPE", "EOF")

_beacon = Beacon(launched_world_size() or 1)  # of this process, for those who ask from elsewhere
_asked: tuple[float, Sighting | None] = (0.0, None)  # when rank 0 asked last, and who it is


def _answer(question: str) -> str:
    global _asked
    told = json.loads(question)
    _asked = (time.monotonic(), Sighting.from_json(told["asker"]))
    return json.dumps(_beacon.tell(closely=told["closely"]).to_json())


def _end_too(why: str) -> None:
    logger.error("rank 0 ends the job: %s", why)
    threading.Thread(target=_exit, daemon=True).start()  # after the answer to this


def _exit() -> None:
    time.sleep(GRACE_SECONDS)
    for handler in logger.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)  # whatever the main thread waits for, and whatever would wait for it


class Doctor:
    """On rank 0."""

    def __init__(
        self,
        world: World,
        beacon: Beacon,
        coordination: Callable[..., Coordination],
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
        self._members = {rank: Member(rank=rank) for rank in range(world.size)}
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

    def members(self, *, closely: bool) -> list[Member]:
        """All processes as they are now; one that does not answer, as it was last seen."""
        with self._asking:
            told = self._ask(closely)
            now = time.monotonic()
            for rank, answer in told.items():
                before = self._members[rank]
                if isinstance(answer, Sighting):
                    self._heard_at[rank] = now
                    self._members[rank] = Member(rank=rank, seen=answer)
                else:
                    silent = now - self._heard_at[rank]
                    state = _state_of(before.seen, answer)
                    self._members[rank] = Member(rank=rank, seen=before.seen, silent_seconds=silent, state=state)
            return list(self._members.values())

    def cause(self) -> str | None:
        """Who holds up the others, by name; None: no process in particular."""
        cause = cause_of(self.members(closely=True), self._coordination(closely=True))
        return cause.text if cause.rank is not None else None

    def _ask(self, closely: bool) -> dict[int, Sighting | RuntimeError]:
        own = self._beacon.tell(closely=closely)
        told: dict[int, Sighting | RuntimeError] = {0: own}
        question = json.dumps({"closely": closely, "asker": own.to_json()})
        asked: dict[int, Any] = {}
        for rank, member in self._members.items():
            if rank and member.state != GONE:
                seconds = AGAIN_SECONDS if member.silent_seconds else ANSWER_SECONDS
                try:
                    asked[rank] = rpc.rpc_async(name_of(rank), _answer, args=(question,), timeout=seconds)
                except RuntimeError as error:
                    told[rank] = error
        for rank, future in asked.items():
            try:
                told[rank] = Sighting.from_json(json.loads(future.wait()))
            except RuntimeError as error:
                told[rank] = error
        return told

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except Exception:
                logger.exception("the doctor cannot look after this run any more")
                return
            self._over.wait(self._interval)

    def _look(self) -> None:
        members = self.members(closely=False)
        now = time.monotonic()
        if self._over.is_set():
            return
        if now - self._looked_at > self._interval + 4 * ANSWER_SECONDS:  # it was this process that stood still
            self._changed_at = now
        self._looked_at = now
        for member in members:
            if member.state == GONE:
                self.stop()
                self._on_gone(member.rank, cause_of([member], Coordination()).text)
                return
        coordination = self._coordination()
        marks = (coordination.command, coordination.is_waiting, *(m.seen and m.seen.mark for m in members))
        if marks != self._marks:
            if self._has_told:
                _say(f"adl-dist: going on, after {now - self._changed_at:.0f} s without progress")
            self._marks, self._changed_at, self._has_told = marks, now, False
            return
        still = now - self._changed_at
        if self._abort_seconds is not None and still >= self._abort_seconds:
            self._end(still)
        elif still >= self._stall_seconds and not self._has_told:
            self._has_told = True
            self._tell(still)

    def _tell(self, still: float) -> None:
        members, coordination = self.members(closely=True), self._coordination(closely=True)
        cause = cause_of(members, coordination)
        end = f"; after {self._abort_seconds:g} s the job is ended" if self._abort_seconds is not None else ""
        _say(
            f"adl-dist: no progress in {still:.1f} s (runtime.stall_seconds={self._stall_seconds:g}){end}\n"
            f"{picture(members, coordination)}\nlikely cause: {cause.text}"
        )

    def _end(self, still: float) -> None:
        members = self.members(closely=True)
        cause: Cause = cause_of(members, self._coordination(closely=True))
        why = f"no progress in {still:.1f} s (runtime.abort_seconds={self._abort_seconds:g}): {cause.text}"
        _say(f"adl-dist: error: {why}; the same command goes on from the last checkpoint", logging.ERROR)
        self._on_end()
        told = []
        for member in members[1:]:
            with suppress(RuntimeError):
                told.append(rpc.rpc_async(name_of(member.rank), _end_too, args=(why,), timeout=ANSWER_SECONDS))
        for member in members[1:]:
            # Before anything is waited for: the launcher ends this process as soon as another one has ended.
            if member.seen and member.silent_seconds:
                kill(member.seen)
        for future in told:
            with suppress(RuntimeError):
                future.wait()
        _exit()


class Deputy:
    """In every other process: ends it when rank 0, which would see to that, has not asked for long."""

    def __init__(self, rank: int, *, stall_seconds: float, abort_seconds: float | None) -> None:
        """For ``rank``, with the limits of :class:`Doctor`; the first of the deputies also speaks."""
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
            if asker is None:  # it has yet to start
                self._began = now
                continue
            still = now - max(asked_at, self._began)
            if self._abort_seconds is not None and still >= self._abort_seconds + ANSWER_SECONDS:
                _say(f"adl-dist: error: rank {self._rank} ends itself: {_of_rank_0(asker, still)}", logging.ERROR)
                kill(asker)
                _exit()
            elif still < self._stall_seconds:
                self._has_told = False
            elif not self._has_told and self._rank == 1:
                self._has_told = True
                _say(f"adl-dist: {_of_rank_0(asker, still)}")


def shine(beacon: Beacon) -> None:
    """Let ``beacon`` answer those who ask this process from now on."""
    global _beacon, _asked
    beacon.shine()
    _beacon, _asked = beacon, (time.monotonic(), None)


def gone_rank_0() -> str | None:
    """For a process that waits in vain: a line about rank 0 if that is gone, as far as can be seen from here."""
    asker = _asked[1]
    if asker is None or asker.machine == "" or asker.machine != machine() or not _is_dead(asker):
        return None
    return cause_of([Member(rank=0, seen=asker, silent_seconds=1.0, state=GONE)], Coordination()).text


def _of_rank_0(asker: Sighting, still: float) -> str:
    silent = Member(rank=0, seen=asker, silent_seconds=still, state=_state_of(asker, RuntimeError()))
    said = cause_of([silent], Coordination()).text
    return f"rank 0, which looks after the job, has not asked for {still:.0f} s; {said}"


def _state_of(seen: Sighting | None, error: RuntimeError) -> str:
    """Of a process that does not answer; see :class:`Member`."""
    if seen is not None and seen.machine and seen.machine == machine():
        return GONE if _is_dead(seen) else state_of(seen.pid)
    return GONE if any(word in str(error) for word in REFUSALS) else ""


def _is_dead(seen: Sighting) -> bool:
    return born(seen.pid) != seen.born or state_of(seen.pid) == "Z"


def _say(text: str, level: int = logging.WARNING) -> None:
    if logger.hasHandlers():  # without any, logging would write to standard error by itself
        logger.log(level, "%s", text)
    sys.stderr.write(text + "\n")  # in one piece: other processes write there too
    sys.stderr.flush()
