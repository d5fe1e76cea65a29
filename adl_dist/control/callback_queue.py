"""Calls of callbacks and loggers, apart from training's random streams."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from adl_dist.errors import CallbackError
from adl_dist.streams import streams_kept


class CallbackQueue:
    """A queue of calls of the user's code, made between training's actions.

    A forward seeds torch's global random stream and then draws from it. A call in a different thread could draw in
    between and change a dropout mask.
    """

    def __init__(self) -> None:
        """Create an empty queue."""
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_training = self._has_failed = False
        self._running = threading.Lock()  # held by the thread that makes the calls

    @property
    def is_waiting(self) -> bool:
        """Whether a call waits."""
        return bool(self._waiting)

    def put(self, call: Callable[[], object]) -> None:
        """Make ``call`` now or, during training, in :meth:`run_waiting`."""
        if not self._has_failed:
            self._waiting.append(call)
        if not self._is_training:
            self.run_waiting()

    def run_waiting(self) -> None:
        """Make the waiting calls in order, and restore the random streams.

        If a different thread is making calls, as when a process fails while rank 0 trains, that thread makes them all.
        The first error is raised, and no further call is made.
        """
        if not self._waiting or not self._running.acquire(blocking=False):
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
            self._running.release()

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Let calls wait inside the block; make the remaining ones at its end."""
        self._is_training = True
        try:
            yield
        except BaseException:
            with suppress(CallbackError):  # it is in the log; the error of training says more
                self.run_waiting()
            raise
        finally:
            self._is_training = False
        self.run_waiting()
