"""Threads of a simulated process that write while it trains: they run when the clock says, not when they please."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any


class Background:
    """Runs each thread in one go, in the order of their starts, some actions later or when it is waited for."""

    def __init__(self, *, seed: int, most_late: int) -> None:
        """Have a thread wait for at most ``most_late`` actions, drawn by ``seed``."""
        self._rng, self._most_late = random.Random(seed), most_late
        self._waiting: deque[_Thread] = deque()
        self._num_actions = 0
        self._is_over = False

    @property
    def threading(self) -> SimpleNamespace:
        """To be used in place of the module."""
        return SimpleNamespace(Thread=partial(_Thread, self))

    def tick(self) -> None:
        """Another action has been done."""
        self._num_actions += 1
        while self._waiting and self._waiting[0].due <= self._num_actions:
            self._waiting.popleft().run()

    def end(self) -> None:
        """Nothing of what waits is ever run."""
        self._is_over = True
        self._waiting.clear()

    def add(self, thread: "_Thread") -> None:
        """Have ``thread`` wait for its time."""
        thread.due = self._num_actions + self._rng.randint(0, self._most_late)
        if not self._is_over:
            self._waiting.append(thread)

    def run_until(self, thread: "_Thread") -> None:
        """Run what waits up to ``thread``, if it waits."""
        while thread in self._waiting:
            self._waiting.popleft().run()


class _Thread:
    def __init__(
        self,
        background: Background,
        *,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._background, self._target, self._args = background, target, args
        self.due = 0

    def start(self) -> None:
        self._background.add(self)

    def join(self, timeout: float | None = None) -> None:
        self._background.run_until(self)

    def run(self) -> None:
        self._target(*self._args)
