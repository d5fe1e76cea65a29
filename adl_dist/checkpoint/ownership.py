"""The owner of a run folder: one process at a time writes there.

Owners are numbered. Who finds the newest owner dead creates the file of the next number, which only one process can
(:mod:`.storage`). An owner on this machine is dead if its process is. An owner elsewhere is dead if its file has not
changed for LEASE_SECONDS, because a living one rewrites it every BEAT_SECONDS; no two clocks are compared.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import PurePath

from adl_dist.checkpoint.storage import read, storage_of
from adl_dist.distributed.procfs import machine, start_time

PREFIX = "owner-"
BEAT_SECONDS, LEASE_SECONDS = 8.0, 30.0
EMPTY_SECONDS = 2.0  # how long an owner file may be empty, as it is while it is made
_held: set[PurePath] = set()  # the owner files of this process


class Ownership:
    """The right to write into ``folder``, which may be taken once it is free.

    Attributes:
        is_lost: whether another process has taken over, because this one did not beat in time.
    """

    def __init__(self, folder: PurePath, launch: str | None = None) -> None:
        """Look at ``folder``; ``launch`` is the id that this process shares with its own restarts, if any."""
        pid = os.getpid()
        self._folder, self._me = (
            folder,
            {"machine": machine(), "pid": pid, "started": start_time(pid), "launch": launch},
        )
        self._file: PurePath | None = None
        self._dead: dict[PurePath, bytes] = {}  # owner files that did not change for LEASE_SECONDS
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_lost = False

    def is_held(self, *, by_own_launch: bool = True) -> bool:
        """Return whether a living process owns the folder, or with False whether one of another launch does."""
        return any(self._is_alive(file, by_own_launch) for file in self._files())

    def take(self) -> bool:
        """Own the folder from now on, and return True; False if it is held. OSError if the storage fails."""
        dead = self._files()
        if any(self._is_alive(file, True) for file in dead):
            return False
        number = 1 + max((int(file.name.removeprefix(PREFIX)) for file in dead), default=0)
        mine = self._folder / f"{PREFIX}{number:08d}"
        try:
            storage_of(mine).create(mine, [self._text(0)])
        except FileExistsError:
            return False
        if {*self._files()} - {*dead, mine}:  # another process found the folder empty meanwhile
            storage_of(mine).delete(mine)
            return False
        for file in dead:
            storage_of(file).delete(file)
        _held.add(mine)
        self._file = mine
        self._thread = threading.Thread(target=self._beat, args=(mine,), name="owner of the run folder", daemon=True)
        self._thread.start()
        return True

    def check(self) -> None:
        """Raise OSError if this process does not own the folder any more."""
        self.is_lost = self.is_lost or self._files()[-1:] != [self._file]
        if self.is_lost:
            raise OSError(f"another process has taken {self._folder} over, because this one did not answer in time")

    def release(self) -> None:
        """Let others own the folder."""
        if self._file is None:
            return
        mine, self._file = self._file, None
        _held.discard(mine)
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        with contextlib.suppress(OSError):
            storage_of(mine).delete(mine)

    def _files(self) -> list[PurePath]:
        names = storage_of(self._folder).names(self._folder)
        return [self._folder / name for name in names if name.startswith(PREFIX) and name[len(PREFIX) :].isdigit()]

    def _is_alive(self, file: PurePath, by_own_launch: bool) -> bool:
        try:
            text = read(file)
        except FileNotFoundError:  # released
            return False
        owner = json.loads(text) if text else {}
        is_near = owner.get("machine") == self._me["machine"] != ""
        is_ours = self._me["launch"] is not None and owner.get("launch") == self._me["launch"]
        if is_ours and not (is_near and by_own_launch):
            return False
        if is_near:
            is_here = owner["pid"] == self._me["pid"]
            return file in _held if is_here else start_time(owner["pid"]) == owner["started"]
        return self._dead.get(file) != text and self._changes(file, text)

    def _changes(self, file: PurePath, text: bytes) -> bool:
        """Return whether an owner file changes within the lease; its end is no sign of life."""
        until = time.monotonic() + (LEASE_SECONDS if text else EMPTY_SECONDS)
        while time.monotonic() < until:
            time.sleep(0.2)
            try:
                if read(file) != text:
                    return True
            except FileNotFoundError:
                return False
        self._dead[file] = text
        return False

    def _text(self, beat: int) -> bytes:
        return json.dumps({**self._me, "beat": beat}).encode()

    def _beat(self, mine: PurePath) -> None:
        beat = 0
        while not self._over.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):  # the next one may succeed before the lease is over
                if self._files()[-1:] != [mine]:
                    self.is_lost = True
                    return
                storage_of(mine).write(mine, self._text(beat))
