"""The user's code that takes the records of a run: callbacks and loggers, called where no stage computes."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from adl_dist.errors import CallbackError
from adl_dist.streams import streams_kept


class UserCode:
    """Calls of the user's code. While stages train, the thread that trains makes them, between two actions.

    A forward seeds torch's global random stream, and then draws from it. Another thread that draws from it, or seeds
    it, at the same time would change what dropout draws.
    """

    def __init__(self) -> None:
        """Begin with no call waiting."""
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_training = self._has_failed = False
        self._making = threading.Lock()  # calls; held by the thread that makes them

    @property
    def is_waiting(self) -> bool:
        """Whether a call waits."""
        return bool(self._waiting)

    def call(self, call: Callable[[], object]) -> None:
        """Make ``call`` now, or, while stages train, have it wait for :meth:`catch_up`."""
        if self._has_failed:
            return
        self._waiting.append(call)
        if not self._is_training:
            self.catch_up()

    def catch_up(self) -> None:
        """Make the calls that wait, in order; the global random streams of the CPU are left as they are.

        If another thread is at it, as when a process fails while rank 0 trains, that one makes them all.

        Raises:
            CallbackError: one of them failed. There will be no others.
        """
        if not self._waiting or not self._making.acquire(blocking=False):
            return
        try:
            with streams_kept():
                while self._waiting:
                    self._waiting.popleft()()
        except BaseException:
            self._has_failed = True
            self._waiting.clear()
            raise
        finally:
            self._making.release()

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Have calls wait while inside, and make at the end those that are left, also of training that has failed."""
        self._is_training = True
        try:
            yield
        except BaseException:
            self._is_training = False
            with suppress(CallbackError):  # is in the log; what has ended the training says more
                self.catch_up()
            raise
        self._is_training = False
        self.catch_up()
