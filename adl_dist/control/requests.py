"""Requests to a running job, by a signal or its socket. No torch."""

import enum
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from adl_dist.errors import AdlError


class RequestKind(enum.Enum):
    """Requests that save; ``STOP`` then stops the run, ``END`` completes it."""

    CHECKPOINT = "checkpoint"
    STOP = "stop"
    END = "end"


class NotDoneError(AdlError, RuntimeError):
    """A request to a run was not carried out; the text says why."""


@dataclass(frozen=True)
class Request:
    """A request to a running job, with its answer to come."""

    what: RequestKind
    why: str  # its origin, for messages: SIGTERM, adl-dist stop
    done: "Future[str]" = field(default_factory=Future)  # the saved checkpoint's path, or NotDoneError

    def answer(self, text: str, *, failed: bool = False) -> None:
        """Answer with ``text``, which is the reason if it has ``failed``."""
        if failed:
            self.done.set_exception(NotDoneError(text))
        else:
            self.done.set_result(text)


class RequestQueue:
    """The open requests of one job, taken while the pipeline is empty."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Request] = []
        self._taken: list[Request] = []
        self._closed = ""

    def ask(self, what: RequestKind, why: str) -> "Future[str]":
        """Add a request, and return the future of its answer."""
        request = Request(what, why)
        request.done.set_running_or_notify_cancel()  # so that the asker cannot cancel it before it is answered
        with self._lock:
            self._open.append(request)
            if self._closed:
                self.close(self._closed)
        return request.done

    @property
    def any_open(self) -> bool:
        """Whether there is a request that has not been taken."""
        return bool(self._open)

    def take(self) -> list[Request]:
        """Take all requests since the last call, oldest first."""
        with self._lock:
            taken, self._open = self._open, []
            self._taken += taken
        return taken

    def close(self, why: str) -> None:
        """Refuse all unanswered and future requests, with the reason ``why``."""
        with self._lock:
            self._closed = why
            self.take()
            for request in (request for request in self._taken if not request.done.done()):
                request.answer(why, failed=True)
