"""The timing model of stages that do whatever is ready, up to a cap: what a free order would take.

Our processes follow a list; this is the other way to run a pipeline. A stage may hold a given number of micro-batches
between their forward and their backward. Whenever it is free it takes the next backward or the next forward,
whichever has arrived; if both have, the preferred one (PipeDream's 1F1B: the backward). The list of a schedule with
delays d keeps the same cap, d + 1, but waits for the action that the list names.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adl_dist.errors import ConfigError
from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.timing import Costs, Slowdown, Span, at_full_speed

Prefer = Literal["backward", "forward"]
SAME_MOMENT = 1e-9  # the same times summed in another order may differ by a rounding


def stragglers(seed: int, *, share: float = 0.25, factor: float = 2.0) -> Slowdown:
    """Return a slowdown that makes a random ``share`` of all actions take ``factor`` times as long."""
    draw = random.Random(seed).random
    return lambda stage, action: factor if draw() < share else 1.0


def simulate_dataflow(
    costs: Costs,
    caps: Sequence[int],
    *,
    num_micro_batches: int,
    accumulation_steps: int = 1,
    prefer: Prefer = "backward",
    slowdown: Slowdown = at_full_speed,
) -> list[Span]:
    """Return when each forward, backward and update of each stage starts and ends.

    Args:
        costs: what each action of each stage takes.
        caps: for each stage, the most micro-batches in flight, including the one in its forward.
        num_micro_batches: N, the length of the one segment.
        accumulation_steps: M.
        prefer: the action that a stage takes if both are ready.
        slowdown: factor on the cost of one action, for stragglers.

    Raises:
        ConfigError: the number of caps is not K, or one is below 1.
    """
    K, N = len(costs.forward), num_micro_batches
    if len(caps) != K or min(caps) < 1:
        raise ConfigError(f"caps={list(caps)}: expected {K} numbers of at least 1, one for each stage")
    stages = _Stages(costs, caps, prefer, slowdown, [[0.0] * N] + [[] for _ in range(K - 1)])
    # What starts first is settled first: nothing that is not known yet can come before it.
    while ready := [option for k in range(K) for option in stages.options(k)]:
        _, k, op = min(ready, key=lambda option: option[:2])
        if op is Op.FORWARD:
            stages.go_forward(k)
            continue
        b, end = stages.go_backward(k)
        if (b + 1) % accumulation_steps == 0 or b + 1 == N:
            stages.spend(k, Action(Op.UPDATE, b // accumulation_steps), end)
    return stages.spans


@dataclass
class _Stages:
    """All stages at one moment of the simulation; ``acts``, ``grads``: when each message arrives, in order."""

    costs: Costs
    caps: Sequence[int]
    prefer: Prefer
    slowdown: Slowdown
    acts: list[list[float]]

    def __post_init__(self) -> None:
        K = len(self.caps)
        self.free = [0.0] * K
        self.grads: list[list[float]] = [[] for _ in range(K)]
        self.num_forward, self.num_backward = [0] * K, [0] * K
        self.spans: list[Span] = []

    def spend(self, stage: int, action: Action, start: float) -> float:
        """Have ``stage`` do ``action`` from ``start`` on; return when it ends."""
        self.free[stage] = start + self.costs.of(stage, action.op) * self.slowdown(stage, action)
        self.spans.append(Span(stage, action, start, self.free[stage]))
        return self.free[stage]

    def options(self, stage: int) -> list[tuple[float, int, Op]]:
        """Return what ``stage`` can do next and when; a tie goes to the preferred action."""
        f, b = self.num_forward[stage], self.num_backward[stage]
        ready = []
        if b < len(self.grads[stage]):
            later = SAME_MOMENT * (self.prefer == "forward")
            ready.append((max(self.free[stage], self.grads[stage][b]) + later, stage, Op.BACKWARD))
        if f < len(self.acts[stage]) and f - b < self.caps[stage]:
            later = SAME_MOMENT * (self.prefer == "backward")
            ready.append((max(self.free[stage], self.acts[stage][f]) + later, stage, Op.FORWARD))
        return ready

    def go_forward(self, k: int) -> None:
        """Do the next forward of stage ``k``, and send what comes out."""
        b = self.num_forward[k]
        end = self.spend(k, Action(Op.FORWARD, b), max(self.free[k], self.acts[k][b]))
        self.num_forward[k] += 1
        if k < len(self.caps) - 1:
            self.acts[k + 1].append(end + self.costs.between(k, k + 1))
        else:
            self.grads[k].append(end)

    def go_backward(self, k: int) -> tuple[int, float]:
        """Do the next backward of stage ``k``, and send its gradient; return its number and its end."""
        b = self.num_backward[k]
        end = self.spend(k, Action(Op.BACKWARD, b), max(self.free[k], self.grads[k][b]))
        self.num_backward[k] += 1
        if k > 0:
            self.grads[k - 1].append(end + self.costs.between(k, k - 1))
        return b, end


def simulate_synchronous(costs: Costs, *, num_micro_batches: int, slowdown: Slowdown = at_full_speed) -> float:
    """Return the time of as many slots if all stages meet after each, as in the loop of the authors' code.

    In a slot every stage does one forward and one backward; the slowest decides. Filling, draining and links are
    left out.
    """
    K = len(costs.forward)

    def slot(b: int) -> float:
        return max(
            sum(costs.of(k, op) * slowdown(k, Action(op, b)) for op in (Op.FORWARD, Op.BACKWARD)) for k in range(K)
        )

    return sum(slot(b) for b in range(num_micro_batches))
