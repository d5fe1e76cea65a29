"""In which order things happen: messages take their time, and stages are paused."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adl_dist.schedule import Action, replay
from adl_dist.schedule.actions import LINKS, RECEIVES, receiver
from adl_dist.transport import LocalChannel

ActionLists = Sequence[Sequence[Action]]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How late things are. Times are counted in actions of all stages together.

    Attributes:
        seed: of all that is drawn while it runs.
        share_late: of the messages that are held back.
        most_late: for how long at most; also for a thread in the background.
        pauses: (stage, from when, for how long) that a stage does nothing.
    """

    seed: int
    share_late: float = 0.0
    most_late: int = 0
    pauses: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        paused = "".join(f", stage {k} paused from {begin} for {length}" for k, begin, length in self.pauses)
        return f"{self.share_late:.0%} of messages up to {self.most_late} late{paused}"


class Clock:
    """Takes the place of :func:`replay`: the same orders are possible, and which of them comes is up to the weather."""

    def __init__(self, weather: Weather) -> None:
        self._weather, self._rng = weather, random.Random(weather.seed)
        self._now = 0

    def replay(self, lists: ActionLists, *, pick_next: Callable[[Sequence[int]], int]) -> Iterator[tuple[int, Action]]:
        """See :func:`adl_dist.schedule.replay`; ``pick_next`` is not asked."""
        cursor = [0] * len(lists)
        arrivals: dict[tuple[str, int], deque[int]] = defaultdict(deque)
        for stage, action in replay(lists, pick_next=partial(self._choose, lists, cursor, arrivals)):
            cursor[stage] += 1
            self._now += 1
            if action.op in LINKS:
                edge = LINKS[action.op].what, receiver(action.op, stage, num_stages=len(lists))
                late = self._rng.random() < self._weather.share_late
                arrival = self._now + (self._rng.randint(1, self._weather.most_late) if late else 0)
                arrivals[edge].append(max([arrival, *arrivals[edge]]))  # no message overtakes another of its edge
            elif action.op in RECEIVES:
                arrivals[RECEIVES[action.op].what, stage].popleft()
            yield stage, action

    def _choose(
        self,
        lists: ActionLists,
        cursor: Sequence[int],
        arrivals: dict[tuple[str, int], deque[int]],
        runnable: Sequence[int],
    ) -> int:
        def time(k: int) -> int:  # when stage k can go on
            pauses = [(begin, length) for stage, begin, length in self._weather.pauses if stage == k]
            ends = [begin + length for begin, length in pauses if begin <= self._now]
            action = lists[k][cursor[k]]
            if action.op in RECEIVES:
                ends.append(arrivals[RECEIVES[action.op].what, k][0])
            return max(ends, default=0)

        times = {k: time(k) for k in runnable}
        self._now = max(self._now, min(times.values()))  # if all wait, nothing else happens until then
        return self._rng.choice([k for k in runnable if times[k] <= self._now])


class WatchedChannel(LocalChannel):
    """Sees to it that a message is the same when it arrives, however late: nobody wrote to it meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._copies: deque[list[Tensor]] = deque()

    def send(self, micro_batch: int, tensors: tuple[Tensor, ...]) -> None:
        """See :class:`LocalChannel`."""
        super().send(micro_batch, tensors)
        self._copies.append([tensor.detach().clone() for tensor in tensors])

    def recv(self, micro_batch: int) -> tuple[Tensor, ...]:
        """See :class:`LocalChannel`."""
        tensors = super().recv(micro_batch)
        for sent, tensor in zip(self._copies.popleft(), tensors, strict=True):
            assert torch.equal(sent, tensor), f"micro-batch {micro_batch} was written to on its way"
        return tensors
