"""The user's code that takes the records of a run: callbacks and loggers, called where no stage computes."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        """Make the calls that wait, in order; the global random streams are left as they are.

        Raises:
            CallbackError: one of them failed. There will be no others.
        """
        if not self._waiting:
            return
        with streams_kept():
            while self._waiting:
                try:
                    self._waiting.popleft()()
                except BaseException:
                    self._has_failed = True
                    self._waiting.clear()
                    raise

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Have calls wait while inside, and make at the end those that are left."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            self.catch_up()
