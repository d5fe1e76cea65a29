"""Calls over the control plane to processes that may be gone.

RPC raises a bare RuntimeError both if the other process is gone and if it has not answered in time. So an event here
keeps the time limit, and RPC's own limit is later: an error of RPC then means that a process is gone.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.futures

from adl_dist.errors import ChannelError

T = TypeVar("T")
RPC_SPARE_SECONDS = 60.0  # between our time limit and RPC's own


class PeerError(ChannelError):
    """A call over the control plane failed."""


class PeerLateError(PeerError):
    """A process has not answered in time; it may be busy."""


class PeerGoneError(PeerError):
    """The connection to a process is closed."""


class Call(Generic[T]):
    """A call to a process that times out after ``seconds``."""

    def __init__(self, name: str, start: Callable[[float], "torch.futures.Future[T]"], seconds: float) -> None:
        """Start the call by ``start``, which takes RPC's own limit in seconds."""
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
            PeerLateError: If there is no answer in time.
            PeerGoneError: If the process is gone.
            PeerError: If this process has left the control plane.
        """
        if self._future is None:
            reason = first_line(self._not_started)
            raise PeerError(f"control plane: this process has left it: {reason}") from self._not_started
        if not self._is_done.wait(max(0.0, self._deadline - time.monotonic())):
            raise PeerLateError(f"control plane: {self._name} does not answer within {self._seconds:g} s")
        try:
            return self._future.wait()
        except RuntimeError as error:
            raise PeerGoneError(f"control plane: {self._name} is gone: {first_line(error)}") from error

    def answer_or_error(self) -> T | PeerError:
        """Return the answer, or the error that :meth:`wait` raises."""
        try:
            return self.wait()
        except PeerError as error:
            return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
