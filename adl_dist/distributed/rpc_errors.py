"""Calls over the control plane to processes that may be gone. The one place that knows how torch's RPC fails.

RPC raises a bare RuntimeError, whose text alone says whether the other process is gone or has not answered in time. So
the time limit is kept here, by an event, and RPC's own is set later: what RPC itself reports is that a process is gone.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.futures

from adl_dist.errors import ChannelError

T = TypeVar("T")
RPC_SPARE_SECONDS = 60.0  # by which RPC's own time limit comes later than ours


class PeerError(ChannelError):
    """A call over the control plane has failed: this process has left the others, or see the subclasses."""


class PeerLateError(PeerError):
    """A process has not answered in time. It may be busy, and gets the message later."""


class PeerGoneError(PeerError):
    """The connection to a process is closed."""


class Call(Generic[T]):
    """A call under way."""

    def __init__(self, name: str, start: Callable[[float], "torch.futures.Future[T]"], seconds: float) -> None:
        """Start it.

        Args:
            name: the process that is called, for messages.
            start: starts the call with RPC, which may give up after so many seconds.
            seconds: after which the process is late.
        """
        self._name, self._seconds, self._deadline = name, seconds, time.monotonic() + seconds
        self._is_done = threading.Event()
        self._future: torch.futures.Future[T] | None = None
        try:
            self._future = start(seconds + RPC_SPARE_SECONDS)
            self._future.add_done_callback(lambda _: self._is_done.set())
        except RuntimeError as error:
            self._not_started = error

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` returns or raises at once."""
        return self._future is None or self._is_done.is_set()

    def wait(self) -> T:
        """Return the answer.

        Raises:
            PeerLateError: there was none in time.
            PeerGoneError: the process is gone.
            PeerError: this process has left the control plane.
        """
        if self._future is None:
            reason = _first_line(self._not_started)
            raise PeerError(f"control plane: this process has left it: {reason}") from self._not_started
        if not self._is_done.wait(max(0.0, self._deadline - time.monotonic())):
            raise PeerLateError(f"control plane: {self._name} does not answer within {self._seconds:g} s")
        try:
            return self._future.wait()
        except RuntimeError as error:
            raise PeerGoneError(f"control plane: {self._name} is gone: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
