#!/usr/bin/env python3
"""The least time that any order of the actions of two stages takes: K = 2, delays 1 0, M = 4, a split backward.

    python benchmarks/orders.py [LINK ...]

Forward, I and WG take 1 each; a message takes LINK times the 3 of a micro-batch. Tried are all orders that are alike
for every group and in which the values are those of these delays: I after its forward, WG after its I, a stage's update
after the group's last WG and before the forward that meets it. Compare with what the order of schedule/split.py takes.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

from adl_dist.schedule import Costs, Method, Pipeline
from adl_dist.schedule.timing import time_per_update

M, NUM_GROUPS = 4, 7
Step = tuple[str, int]  # F, I or W, and the micro-batch, counted from the first of the group


def with_weights(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield ``steps``, forwards and I, with the W of each micro-batch at any place after its I."""
    places = {number: place for place, (op, number) in enumerate(steps) if op == "I"}
    for after in combinations_with_replacement(range(len(steps)), M):
        if all(after[b] >= places[b] for b in range(M)):
            yield [
                step
                for place, own in enumerate(steps)
                for step in (own, *(("W", b) for b in range(M) if after[b] == place))
            ]


def orders() -> tuple[list[list[Step]], list[list[Step]]]:
    """Return all orders of one group on stage 0, which is a forward ahead, and on stage 1."""
    of_last = list(with_weights([(op, b) for b in range(M) for op in "FI"]))
    of_first: list[list[Step]] = []
    for forward_first in product((True, False), repeat=M):
        pairs = [(("F", b + 1), ("I", b))[:: 1 if first else -1] for b, first in enumerate(forward_first)]
        of_first += with_weights([step for pair in pairs for step in pair])
    return of_first, of_last


def time_per_micro_batch(of_first: Sequence[Step], of_last: Sequence[Step], link: float) -> float:
    """Return the time in steady state, in units of a stage's work; ``link`` in those of a step."""
    acts, grads = {0: 1 + link}, dict[int, float]()  # when each arrives
    free, ends = [1.0, 0.0], []
    for start in range(0, NUM_GROUPS * M, M):
        todo = [iter(of_first), iter(of_last)]
        at = [next(steps, None) for steps in todo]
        while any(at):
            waiting = at.copy()
            for stage, needed in ((1, ("F", acts)), (0, ("I", grads))):
                while (step := at[stage]) is not None:
                    op, b = step[0], start + step[1]
                    if op == needed[0]:
                        if b not in needed[1]:
                            break
                        free[stage] = max(free[stage], needed[1][b])
                    free[stage] += 1
                    if (stage, op) == (0, "F"):
                        acts[b] = free[0] + link
                    elif (stage, op) == (1, "I"):
                        grads[b] = free[1] + link
                    at[stage] = next(todo[stage], None)
            if at == waiting:
                return math.inf  # each waits for the other
        ends.append(free[1])
    return (ends[-1] - ends[-3]) / 2 / M / 3


def main() -> None:
    """Print one line for each link."""
    of_first, of_last = orders()
    method = Method(name="adl", accumulation_steps=M, delay=(1, 0), split_backward=True)
    for link in map(float, sys.argv[1:] or ("0", "0.1", "0.25", "0.5")):
        least = min(time_per_micro_batch(a, b, 3 * link) for a, b in product(of_first, of_last))
        costs = Costs(forward=[1, 1], backward=[2, 2], link=[3 * link])
        own = time_per_update(Pipeline(method, 2), costs) / M / 3
        num = len(of_first) * len(of_last)
        print(f"link {link:g}: the best of {num:,} orders takes {least:.3f}, that of the engine {own:.3f}")


if __name__ == "__main__":
    main()
