"""A disk that fails, or with which the process dies, at any byte and between any two operations.

Every write, rename and removal below one folder goes through here, whoever asks for it: Python's own ``open`` and
``os`` are replaced for as long as a simulated process lives. Logs are left alone: they are not part of a run's state.
"""

import builtins
import errno
import io
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

FileIO = io.FileIO  # the real one
PLACES = ("checkpoints", "metrics", "others")


class Died(BaseException):
    """The simulated process has been killed; whatever runs after that is not part of it."""


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """What goes wrong at one event.

    Attributes:
        place: which events are counted, of ``PLACES``.
        event: its number among them.
        share: of the bytes of a write that still arrive; of another event whether it happens (0.5 and more) or not.
        error: the errno of the failure; None: the process dies.
        lasts: whether everything after it fails too.
    """

    place: str
    event: int
    share: float
    error: int | None
    lasts: bool = False


class Disk:
    """What happens below ``folder`` while :meth:`watched`.

    Attributes:
        num_events: how many there were, by place.
        struck: the event at which the fault was planted, once it has come.
        failures: every error that it has raised.
        is_dead: whether nothing reaches the disk any more.
    """

    def __init__(self, folder, fault, die):
        """Take the ``fault``; ``die`` is called at the moment of death, and what it returns is raised."""
        self._folder, self._fault, self._die = f"{folder}{os.sep}", fault, die
        self.is_dead = False
        self.num_events = dict.fromkeys(PLACES, 0)
        self.struck = ""
        self.failures = []

    @contextmanager
    def watched(self):
        """Have all that this process writes go through here."""
        with ExitStack() as stack:
            for module in (builtins, io):
                stack.enter_context(patch.object(module, "open", self._opening(io.open)))
            for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir"):
                stack.enter_context(patch.object(os, name, self._changing(name, getattr(os, name))))
            stack.enter_context(patch.object(io, "FileIO", self._raw))
            stack.enter_context(patch.object(os, "fsync", self._sync))
            yield

    def write(self, path, data, write):
        if self.is_dead:
            return len(data)  # some buffer is emptied while the process unwinds
        had_struck = bool(self.struck)
        if not self._strikes(self._place(path), f"write of {len(data)} bytes: {path.removeprefix(self._folder)}"):
            return write(data)
        if not had_struck:
            write(data[: int(self._fault.share * len(data))])
        return self._strike()

    def _strike(self):
        if self._fault.error is None:
            raise self._die()
        self.failures.append(OSError(self._fault.error, f"{os.strerror(self._fault.error)} (planted)"))
        raise self.failures[-1]

    def _sync(self, descriptor):
        if self.is_dead:
            raise Died
        if self._strikes("checkpoints", "fsync"):
            self._strike()

    def _changing(self, name, change):
        def changed(path, *arguments, **options):
            # What is named relative to an open folder is being removed with it, and only checkpoints ever are.
            place = "checkpoints" if options.get("dir_fd") is not None else self._place(os.fspath(path))
            happens = partial(change, path, *arguments, **options)
            if not place or (name == "mkdir" and os.path.isdir(path)):  # which raises
                happens()
                return
            if self.is_dead:
                raise Died
            strikes = self._strikes(place, f"{name}: {os.fspath(path).removeprefix(self._folder)}")
            fault = self._fault if strikes else None
            # To remove and to rename takes no room. The process may die before or after it.
            has_room = fault is not None and fault.error == errno.ENOSPC and name != "mkdir"
            if fault is None or has_room or (fault.error is None and fault.share >= 0.5):
                happens()
            if fault is not None and not has_room:
                self._strike()

        return changed

    def _opening(self, open_):
        def opened(file, mode="r", buffering=-1, *arguments, **options):
            path = "" if isinstance(file, int) else os.fspath(file)
            if not self._is_written(str(path), mode):
                return open_(file, mode, buffering, *arguments, **options)
            raw = self._raw(path, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **options)

        return opened

    def _raw(self, file, mode="r", *arguments, **options):
        """Like ``io.FileIO``."""
        path = "" if isinstance(file, int) else str(file)
        if not self._is_written(path, mode):
            return FileIO(file, mode, *arguments, **options)
        if self.is_dead:
            raise Died
        if self._strikes(self._place(path), f"open: {path.removeprefix(self._folder)}"):
            self._strike()
        return _File(path, mode, self)

    def _is_written(self, path, mode):
        return bool(set(mode) & set("wax+")) and bool(self._place(path))

    def _place(self, path):
        """Where ``path`` is, of ``PLACES``; nothing if that does not matter."""
        inside = path.removeprefix(self._folder)
        if inside == path or inside.startswith("logs"):
            return ""
        return next((place for place in PLACES if inside.lstrip(".").startswith(place)), "others")

    def _strikes(self, place, event):
        """Count ``event``; return whether it is to go wrong."""
        number, fault = self.num_events[place], self._fault
        self.num_events[place] += 1
        if fault is None or self.struck:
            return fault is not None and fault.lasts
        if (fault.place, fault.event) == (place, number):
            self.struck = event
        return bool(self.struck)


class _File(FileIO):
    """A file open for writing, below all of Python's buffers."""

    def __init__(self, path, mode, disk):
        super().__init__(path, mode)
        self._path, self._disk = path, disk

    def write(self, data):
        return self._disk.write(self._path, memoryview(data).cast("B"), super().write)

    def truncate(self, size=None):
        return super().truncate(size) if not self._disk.is_dead else 0
