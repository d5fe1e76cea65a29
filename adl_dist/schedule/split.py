"""The order of actions with a split backward.

I computes the gradient of the input, WG those of the weights. A stage does WG when it would otherwise wait, so that no
stage upstream waits for it. The best order depends on all stages together, so it comes from a simulation: a free stage
does the I that is ready, otherwise the forward, otherwise a WG. The order between two updates of a stage does not
change values, and a forward sees the same updates as without the split. Stage 0 may do both parts at once:
:meth:`Pipeline.splits_backward`.

In the simulation a forward, an I and a WG take the same time. A message takes as long as the delays leave room for, so
that longer delays serve real links.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import inf
from typing import Any, NamedTuple

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.parts import (
    Place,
    backward_part,
    ends_of,
    forward_part,
    gradient_part,
    places_of,
    tied_updates_left,
    update_part,
)
from adl_dist.schedule.pipeline import Pipeline

PART = 12  # the time of a forward, an I or a WG; a whole number, so that rounding decides nothing
MOST_STATES = 500  # remembered to find a period; a segment without one is simulated to its end

# From the state of all stages to the updates, the time and the numbers of actions at that moment.
States = dict[tuple[Any, ...], tuple[int, int, list[int]]]


class Repeat(NamedTuple):
    """A part of a list of actions to repeat."""

    start: int
    end: int
    times: int
    groups: int  # in each repetition


def split_actions(pipeline: Pipeline, stage: int, group_sizes: tuple[int, ...]) -> list[Action]:
    """Return the actions of ``stage`` for groups of ``group_sizes``."""
    actions = _listed(pipeline, stage, group_sizes)
    if not pipeline.ties_of(stage) and not pipeline.shares_norms:
        return actions
    ends = ends_of([*enumerate(group_sizes)])
    parts = [
        [*gradient_part(pipeline, stage, number, ends), *update_part(pipeline, stage, number, ends)]
        if op is Op.UPDATE
        else [Action(op, number)]
        for op, number, *_ in actions
    ]
    return [*chain.from_iterable(parts), *tied_updates_left(pipeline, stage, ends)]


def _listed(pipeline: Pipeline, stage: int, group_sizes: tuple[int, ...]) -> list[Action]:
    actions, repeat = simulated(pipeline, group_sizes)[stage]
    if repeat is None:
        return list(actions)
    listed = actions[: repeat.end]
    for number in range(1, repeat.times):
        groups = number * repeat.groups
        listed += _later(actions[repeat.start : repeat.end], groups, groups * group_sizes[0])
    return listed + actions[repeat.end :]


@lru_cache(maxsize=1)  # shared by the stages of a process
def simulated(
    pipeline: Pipeline, group_sizes: tuple[int, ...], most_states: int = MOST_STATES
) -> list[tuple[list[Action], Repeat | None]]:
    """Return (actions, part to repeat or None) of each stage."""
    K, link = pipeline.num_stages, room_for_links(pipeline)
    groups = _Groups(pipeline, group_sizes)
    stages = [_Stage(pipeline, k, groups) for k in range(K)]
    times = [stage.next_time() for stage in stages]
    states: States = {}
    repeats: list[Repeat] = []
    while (now := min(times)) < inf:
        k = K - 1 - times[::-1].index(now)  # the one nearest the loss
        done = stages[k].advance(now)
        for op, *_ in done:
            arrives = stages[k].free + link
            if op is Op.SEND_ACT:
                stages[k + 1].acts.append(arrives)
            elif op is Op.SEND_GRAD:
                stages[k - 1].grads.append(arrives)
            elif op is Op.SEND_GO:
                stages[k - 1].words.append(stages[k].free)
        for j in range(max(k - 1, 0), min(k + 2, K)):
            times[j] = stages[j].next_time()
        if k == K - 1 and not repeats and len(states) < most_states and done and done[-1].op is Op.UPDATE:
            repeats = _skip_what_repeats(stages, int(now), states)
            times = [stage.next_time() for stage in stages]
    return [(stage.actions, repeats[k] if repeats else None) for k, stage in enumerate(stages)]


def _skip_what_repeats(stages: Sequence["_Stage"], now: int, states: States) -> list[Repeat]:
    """Skip ahead if the state repeats; return the repeated parts, or [].

    From there on everything repeats until a stage comes near the end of the segment.
    """
    if min(stage.num_updates for stage in stages) < 2:  # the first groups differ, and the pipeline fills
        return []
    updates, lengths = stages[-1].num_updates, [len(stage.actions) for stage in stages]
    state = tuple(stage.state(now, updates) for stage in stages)
    before, then, starts = states.setdefault(state, (updates, now, lengths))
    period = updates - before
    num = min(stage.room(period) for stage in stages) if period else 0
    if num <= 0:
        return []
    for stage in stages:
        stage.skip(num * period, num * (now - then))
    return [Repeat(*ends, num + 1, period) for ends in zip(starts, lengths, strict=True)]


def _later(actions: Sequence[Action], groups: int, micro_batches: int) -> list[Action]:
    """Return ``actions`` with raised numbers of micro-batches and groups."""
    of_groups = Op.UPDATE, Op.WEIGHTS
    return [Action(op, number + (groups if op in of_groups else micro_batches)) for op, number, *_ in actions]


def room_for_links(pipeline: Pipeline) -> int:
    """Return the longest time of a message with which no stage ever waits."""
    if pipeline.flush:  # stages wait anyway
        return 0
    rooms = map(pipeline.room_for_links, range(pipeline.num_stages - 1))
    return max(0, int(PART * min(rooms, default=0)))


class _Groups:
    """The groups of a segment, for all stages."""

    def __init__(self, pipeline: Pipeline, sizes: Sequence[int]) -> None:
        self.places: list[Place] = places_of(list(enumerate(sizes)))  # of each micro-batch
        self.ends = list(accumulate(sizes))
        in_reverse, firsts = pipeline.spec.last_in_first_out, [0, *self.ends]
        ranges = [range(first, end) for first, end in zip(firsts, self.ends, strict=False)]
        self.order = [b for group in ranges for b in (reversed(group) if in_reverse else group)]  # of the backwards
        self.size = sizes[0] if sizes else 1  # of all groups up to micro-batch ``alike``
        num_alike = next((number for number, size in enumerate(sizes) if size != self.size), len(sizes))
        self.alike = num_alike * self.size


class _Stage:
    """One stage in the simulation, with its actions so far."""

    def __init__(self, pipeline: Pipeline, index: int, groups: _Groups) -> None:
        self.actions: list[Action] = []
        self.free = 0  # the time when it is free
        self.acts: deque[int] = deque()  # arrival times of the messages that are not taken yet
        self.grads: deque[int] = deque()
        self.words: deque[int] = deque()  # of the forward lock
        self._pipeline, self._index, self._delay = pipeline, index, pipeline.delays[index]
        self._splits = pipeline.splits_backward(index)
        self._groups, self._places, self._ends, self._order = groups, groups.places, groups.ends, groups.order
        self.num_updates = self._num_forward = self._num_backward = 0
        self._deferred: deque[int] = deque()
        self._locked: list[Action] = []  # after a forward that has not passed all stages yet

    def next_time(self) -> float:
        """Return the time of the next action, or infinity if it waits."""
        ready = [self._word()] if self._locked else [self._forward(), self._backward(), 0 if self._deferred else inf]
        return max(self.free, min(ready))

    def advance(self, now: float) -> list[Action]:
        """Run the next actions at ``now``, and return them."""
        before = len(self.actions)
        if self._locked:
            self.free = int(now)
            self.words.popleft()
            self.actions += self._locked
            self._locked = []
        elif self._forward() <= now and (self._backward() > now or not self._splits):
            self._do_forward(int(now))
        elif self._backward() <= now and len(self._deferred) < self._pipeline.method.max_deferred:
            self._do_backward(int(now))
        else:
            self.actions.append(Action(Op.BACKWARD_WEIGHT, self._deferred.popleft()))
            self.free = int(now) + PART
        while self._may_update():
            self.actions.append(Action(Op.UPDATE, self.num_updates))
            self.num_updates += 1
        return self.actions[before:]

    def state(self, now: int, updates: int) -> tuple[Any, ...]:
        """Return the state of the stage relative to ``now`` and ``updates``."""
        first = updates * self._groups.size
        arrivals = ((max(time - now, 0) for time in times) for times in (self.acts, self.grads, self.words))
        return (
            *(self._num_forward - first, self._num_backward - first, self.num_updates - updates),
            *(max(self.free - now, 0), *map(tuple, arrivals)),
            *(tuple(b - first for b in self._deferred), tuple((op, b - first) for op, b, *_ in self._locked)),
        )

    def room(self, num_groups: int) -> int:
        """Return how often the last ``num_groups`` can be repeated."""
        # The end, or a group of a different size, is met by a forward first.
        return (self._groups.alike - 1 - self._num_forward) // (num_groups * self._groups.size)

    def skip(self, num_groups: int, time: int) -> None:
        """Continue as if ``num_groups`` more groups had been done in ``time``."""
        num = num_groups * self._groups.size
        self._num_forward += num
        self._num_backward += num
        self.num_updates += num_groups
        self.free += time
        self.acts, self.grads, self.words = (deque(t + time for t in ts) for ts in (self.acts, self.grads, self.words))
        self._deferred = deque(b + num for b in self._deferred)
        self._locked = _later(self._locked, num_groups, num)

    def _word(self) -> float:
        return self.words[0] if self.words else inf

    def _forward(self) -> float:
        """Return the time when the next forward may begin."""
        b, d = self._num_forward, self._delay
        if b == len(self._places) or b - self._num_backward > d:
            return inf
        seen = b if self._pipeline.flush else b - d
        if seen >= 0 and self.num_updates < self._places[seen].group:
            return inf
        if self._index == 0:
            return 0
        return self.acts[0] if self.acts else inf

    def _backward(self) -> float:
        """Return the time when the next I may begin."""
        if self._num_backward == len(self._order):
            return inf
        b = self._order[self._num_backward]
        if b >= self._num_forward or self.num_updates < self._places[b].group:
            return inf
        if self._index == self._pipeline.num_stages - 1:
            return 0
        return self.grads[0] if self.grads else inf

    def _may_update(self) -> bool:
        if self.num_updates == len(self._ends) or self._deferred:
            return False
        if self._locked and self._pipeline.ties_of(self._index):
            return False  # the sum of tied gradients may follow from what this stage still has to pass on
        end, num = self._ends[self.num_updates], len(self._places)
        unseeing = end if self._pipeline.flush else min(end + self._delay, num)  # forwards before it
        return self._num_backward >= end and self._num_forward >= unseeing

    def _do_forward(self, now: int) -> None:
        b = self._num_forward
        actions = list(forward_part(self._pipeline, self._index, b, self._places[b]))
        waits = next((i for i, action in enumerate(actions) if action.op is Op.RECV_GO), len(actions))
        self.actions += actions[:waits]
        self._locked = actions[waits:]
        self._num_forward += 1
        self.free = now + PART
        if self._index > 0:
            self.acts.popleft()

    def _do_backward(self, now: int) -> None:
        b = self._order[self._num_backward]
        op = Op.BACKWARD_INPUT if self._splits else Op.BACKWARD
        actions = list(backward_part(op, self._pipeline, self._index, b, self._places[b]))
        self.actions += actions
        self._num_backward += 1
        self.free = now + PART
        if self._splits:
            self._deferred.append(b)
        else:
            self.free += PART
        if actions[0].op is Op.RECOMPUTE:
            self.free += PART
        if self._index < self._pipeline.num_stages - 1:
            self.grads.popleft()
