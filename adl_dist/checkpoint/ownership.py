"""The owner of a run folder: one process at a time writes there.

Owners are numbered. A process that finds the newest owner dead creates the file of the next number; only one process
can create it (:mod:`.storage`). An owner on this machine is dead if its process is, or if its file was copied here from
another folder. An owner elsewhere is dead if its file has not changed for LEASE_SECONDS, because a living one rewrites
it every BEAT_SECONDS; no two clocks are compared. An owner that finds a file of a higher number has lost the folder,
unless that file is empty: then a process has failed to become the owner.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from adl_dist.checkpoint import storage
from adl_dist.distributed.procfs import machine, start_time, state_of
from adl_dist.errors import TakenOverError
from adl_dist.report import say

PREFIX = "owner-"
BEAT_SECONDS, LEASE_SECONDS = 8.0, 30.0
EMPTY_SECONDS = 2.0  # how long an owner file may be empty, as it is while it is made
_held: set[PurePath] = set()  # the owner files of this process
_dead: dict[PurePath, bytes] = {}  # owner files that this process has seen unchanged for LEASE_SECONDS


class Ownership:
    """The right to write into ``folder``, which may be taken once it is free.

    Attributes:
        lost: the error if another process has taken over, because this one sent no heartbeat in time; otherwise None.
    """

    def __init__(self, folder: PurePath, launch: str | None = None) -> None:
        """Prepare the ownership of ``folder``; restarts share the ``launch`` id."""
        self._folder = folder
        self._me: dict[str, Any] = {
            "machine": machine(),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "launch": launch,
            "folder": str(folder.resolve() if isinstance(folder, Path) else folder),
            "host": socket.gethostname(),
        }
        self._file: PurePath | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: TakenOverError | None = None
        self.holder = "another process"  # the one that was found to own the folder

    def is_held(self, *, waits: bool = True) -> bool:
        """Return whether a process of another launch owns the folder.

        With ``waits=False`` an owner on another machine does not count, because only waiting for its heartbeat can show
        that it is alive.
        """
        launch = self._me["launch"]
        others = {f: text for f, text in self._texts().items() if not launch or _owner_in(text).get("launch") != launch}
        return self._has_owner(others, waits=waits)

    def take(self) -> bool:
        """Take the folder and return True, or False if another process holds it."""
        dead = self._texts()
        if self._has_owner(dead):
            return False
        number = 1 + max((int(file.name.removeprefix(PREFIX)) for file in dead), default=0)
        mine = self._folder / f"{PREFIX}{number:08d}"
        self._me |= {"since": time.strftime("%Y-%m-%d %H:%M:%S"), "id": uuid.uuid4().hex}
        try:
            storage.create(mine, [self._text(0)])
        except FileExistsError:
            return False
        others = {file: text for file, text in self._texts().items() if file != mine}
        if any(dead.get(file) != text for file, text in others.items()):
            storage.delete(mine)  # another process found the folder free meanwhile; numbers may come again
            return False
        for file in dead:
            storage.delete(file)
        _held.add(mine)
        self._file, self.lost = mine, None
        self._thread = threading.Thread(target=self._beat, args=(mine,), name="owner of the run folder", daemon=True)
        self._thread.start()
        return True

    def check(self) -> None:
        """Raise TakenOverError if another process owns the folder now.

        Raise OSError if the owner files cannot be read, or this process's own file is gone.
        """
        assert self._file is not None
        if self.lost is None:
            self._look(self._file)
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Give up the folder, so that other processes can take it."""
        if self._file is None or self._thread is None:
            return
        mine, self._file = self._file, None
        _held.discard(mine)
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            storage.delete(mine)

    def _files(self) -> list[PurePath]:
        names = storage.names(self._folder)
        return [self._folder / name for name in names if name.startswith(PREFIX) and name[len(PREFIX) :].isdigit()]

    def _texts(self) -> dict[PurePath, bytes]:
        texts = {}
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):  # released meanwhile
                texts[file] = storage.read(file)
        return texts

    def _has_owner(self, texts: Mapping[PurePath, bytes], *, waits: bool = True) -> bool:
        for file, text in texts.items():
            if self._is_alive(file, text, waits=waits):
                self.holder = _name_of(_owner_in(text))
                return True
        return False

    def _is_alive(self, file: PurePath, text: bytes, *, waits: bool = True) -> bool:
        owner, me = _owner_in(text), self._me
        if owner.get("machine") != me["machine"] or not me["machine"]:
            return waits and self._changes(file, text)
        if owner.get("folder", me["folder"]) != me["folder"]:  # a copy
            return False
        if owner["pid"] == me["pid"]:
            return file in _held
        return start_time(owner["pid"]) == owner["started"] and state_of(owner["pid"]) not in ("Z", "X")

    def _changes(self, file: PurePath, text: bytes) -> bool:
        """Wait up to the lease; return whether the owner file was rewritten."""
        if _dead.get(file) == text:
            return False
        if text:
            who = f"{_name_of(_owner_in(text))}, which owns {self._folder},"
            say(f"waiting up to {LEASE_SECONDS:g} s to see whether {who} still runs ...")
        until = time.monotonic() + (LEASE_SECONDS if text else EMPTY_SECONDS)
        while time.monotonic() < until:
            time.sleep(0.2)
            try:
                if storage.read(file) != text:
                    return True
            except FileNotFoundError:
                return False
        if text:  # two files of the same name may be empty
            _dead[file] = text
        return False

    def _text(self, beat: int) -> bytes:
        return json.dumps({**self._me, "beat": beat}).encode()

    def _beat(self, mine: PurePath) -> None:
        beat = 0
        while self.lost is None and not self._over.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):  # the next one may succeed before the lease is over
                self._look(mine)
                if self.lost is None:
                    storage.write(mine, self._text(beat))

    def _look(self, mine: PurePath) -> None:
        """Set ``lost`` if another process has taken the folder over."""
        texts = self._texts()
        for file, text in texts.items():
            if text and file != mine and (file.name > mine.name or mine not in texts):
                with contextlib.suppress(FileNotFoundError):
                    time.sleep(0.5)  # a process that has found the folder owned deletes its file again
                    owner = _owner_in(storage.read(file))
                    self.lost = TakenOverError(
                        f"run_dir={self._folder}: {_name_of(owner)} has taken the folder over at "
                        f"{owner.get('since', 'an unknown time')}, because this one, pid {self._me['pid']} on "
                        f"{self._me['host']}, did not answer for {LEASE_SECONDS:g} s; stop that one and give the "
                        "command again to continue from the newest checkpoint, or choose another run_dir"
                    )
                    return
        if mine not in texts:
            raise OSError(f"{mine}, which this process has made, is gone")


def _owner_in(text: bytes) -> dict[str, Any]:
    """Return the content of an owner file, empty if it cannot be read."""
    with contextlib.suppress(ValueError):
        owner = json.loads(text)
        if isinstance(owner, dict) and {"machine", "pid", "started"} <= owner.keys():
            return owner
    return {}


def _name_of(owner: dict[str, Any]) -> str:
    return f"pid {owner['pid']} on {owner.get('host', 'another machine')}" if owner else "another process"
