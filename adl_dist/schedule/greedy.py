"""Asynchronous greedy learning: each stage draws its inputs from a replay buffer (DGL, section 4 and Algorithm 2).

Stages take turns as drawn by a seed, as in the authors' own simulation, so that which input a stage works on is
known beforehand and the run can be repeated. Each stage makes as many steps as the data has micro-batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.pipeline import Pipeline


@dataclass
class Buffer:
    """The replay buffer of a stage; each entry is the number of a step of the stage before."""

    size: int
    most_uses: int | None
    uses: dict[int, int] = field(default_factory=dict)  # how often each entry was used, oldest entry first

    def write(self, entry: int) -> int | None:
        """Add an entry; return the one that had to go for it."""
        self.uses[entry] = 0
        if len(self.uses) <= self.size:
            return None
        oldest = next(iter(self.uses))
        del self.uses[oldest]
        return oldest

    def may_read(self, *, is_final: bool) -> bool:
        """Whether there is an entry to use; once nothing more will come, any may be used again."""
        return any(is_final or self.most_uses is None or n < self.most_uses for n in self.uses.values())

    def read(self) -> int:
        """Return, among the entries used least, the one written last (``priority_lifo``), and count the use."""
        entry = min(reversed(self.uses), key=self.uses.__getitem__)
        self.uses[entry] += 1
        return entry


def greedy_actions(
    pipeline: Pipeline, *, group_sizes: Sequence[int], seed: int
) -> tuple[list[list[Action]], list[list[int]]]:
    """Return the actions of each stage, and for each of its steps the micro-batch of the data it works on.

    ``pipeline`` has a ``buffer_size`` above 0; ``group_sizes`` are the steps of each group, the same for every stage;
    ``seed`` draws the turns.
    """
    method, num_stages = pipeline.method, pipeline.num_stages
    num = sum(group_sizes)
    group_ended_by = {end - 1: group for group, end in enumerate(accumulate(group_sizes))}
    turns = random.Random(seed)
    rates = pipeline.turn_rates
    buffers = [Buffer(method.buffer_size, method.buffer_reuse) for _ in range(num_stages)]
    lists: list[list[Action]] = [[] for _ in range(num_stages)]
    origins: list[list[int]] = [[] for _ in range(num_stages)]

    def may_step(k: int) -> bool:
        if len(origins[k]) == num:
            return False
        return k == 0 or buffers[k].may_read(is_final=len(origins[k - 1]) == num)

    while ready := [k for k in range(num_stages) if may_step(k)]:
        (k,) = turns.choices(ready, weights=[rates[j] for j in ready])
        step, actions = len(origins[k]), lists[k]
        if k == 0:
            actions.append(Action(Op.LOAD, step))
            origins[k].append(step)
        else:
            entry = buffers[k].read()
            actions.append(Action(Op.PICK, entry))
            origins[k].append(origins[k - 1][entry])
        actions.append(Action(Op.FORWARD, step))
        if k < num_stages - 1:
            actions += [Action(Op.SEND_ACT, step), Action(Op.PASS_TARGET, step)]
        actions.append(Action(Op.BACKWARD, step))
        if step in group_ended_by:
            actions.append(Action(Op.UPDATE, group_ended_by[step]))
        if k < num_stages - 1:
            lists[k + 1] += [Action(Op.RECV_ACT, step), Action(Op.TAKE_TARGET, step), Action(Op.KEEP, step)]
            if (gone := buffers[k + 1].write(step)) is not None:
                lists[k + 1].append(Action(Op.DROP, gone))
    for k, buffer in enumerate(buffers):
        lists[k] += [Action(Op.DROP, entry) for entry in buffer.uses]
    return lists, origins
