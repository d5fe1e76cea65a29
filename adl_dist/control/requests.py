"""What is asked of a running job from outside, by a signal or over its socket. Held on rank 0."""

import enum
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from adl_dist.errors import AdlError


class Ask(enum.Enum):
    """What can be asked. Both empty the pipeline and save; ``STOP`` ends the run then."""

    CHECKPOINT = "checkpoint"
    STOP = "stop"


class NotDoneError(AdlError, RuntimeError):
    """What was asked of a run has not been done; it says why."""


@dataclass(frozen=True)
class Request:
    """One thing asked.

    Attributes:
        what: is wanted.
        why: who asked, for messages: ``SIGTERM``, ``adl-dist stop``.
        done: the path of the checkpoint once it is there; or :class:`NotDoneError`.
    """

    what: Ask
    why: str
    done: "Future[str]" = field(default_factory=Future)


class Requests:
    """Taken by the coordinator where the pipeline is empty; asked by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Request] = []

    def ask(self, what: Ask, why: str) -> "Future[str]":
        """Ask for ``what``; return at once."""
        request = Request(what, why)
        with self._lock:
            self._open.append(request)
        return request.done

    @property
    def any_open(self) -> bool:
        """Whether something has been asked and not yet been taken."""
        return bool(self._open)

    def take(self) -> list[Request]:
        """All that has been asked since the last time, oldest first."""
        with self._lock:
            taken, self._open = self._open, []
        return taken

    @staticmethod
    def answer(taken: Iterable[Request], said: str, *, failed: bool = False) -> None:
        """Tell those who asked; ``failed``: that it has not been done, and why."""
        for request in taken:
            if failed:
                request.done.set_exception(NotDoneError(said))
            else:
                request.done.set_result(said)
