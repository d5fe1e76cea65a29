"""What a free order would take: the timing model of stages that do whatever is ready, up to a cap.

Our processes follow a list; this is the other way to run a pipeline. A stage may hold so many micro-batches
between their forward and their backward. Whenever it is free it takes the next backward or the next forward,
whichever is there; if both are, the one preferred (PipeDream's 1F1B: the backward). The list of a schedule with
delays d keeps the same cap, d + 1, but waits for what the list says.
"""

from collections.abc import Sequence
from typing import Literal

from adl_dist.errors import ConfigError
from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.timing import Costs, Slowdown, Span, at_full_speed

Prefer = Literal["backward", "forward"]
SAME_MOMENT = 1e-9  # the same times summed in another order may differ by a rounding


def simulate_dataflow(
    costs: Costs,
    caps: Sequence[int],
    *,
    num_micro_batches: int,
    accumulation_steps: int = 1,
    prefer: Prefer = "backward",
    slowdown: Slowdown = at_full_speed,
) -> list[Span]:
    """When each forward, backward and update of each stage starts and ends.

    Args:
        costs: of all stages.
        caps: of each stage, the most micro-batches in flight, the one that is forwarded included.
        num_micro_batches: N, one segment.
        accumulation_steps: M.
        prefer: what a stage does that could do either.
        slowdown: factor on the cost of one action, for stragglers.

    Raises:
        ConfigError: caps that do not fit the stages.
    """
    K, N = len(costs.forward), num_micro_batches
    if len(caps) != K or min(caps) < 1:
        raise ConfigError(f"caps={list(caps)}: expected {K} numbers of at least 1, one for each stage")
    free = [0.0] * K
    acts: list[list[float]] = [[0.0] * N] + [[] for _ in range(K - 1)]  # when each arrives, in order
    grads: list[list[float]] = [[] for _ in range(K)]
    num_forward, num_backward = [0] * K, [0] * K
    spans = []

    def spend(stage: int, action: Action, start: float) -> float:
        free[stage] = start + costs.of(stage, action.op) * slowdown(stage, action)
        spans.append(Span(stage, action, start, free[stage]))
        return free[stage]

    def options(stage: int) -> list[tuple[float, int, Op]]:
        """What ``stage`` can do next, and from when on; the preferred comes first if both start at the same moment."""
        f, b = num_forward[stage], num_backward[stage]
        found = []
        if b < len(grads[stage]):
            later = SAME_MOMENT * (prefer == "forward")
            found.append((max(free[stage], grads[stage][b]) + later, stage, Op.BACKWARD))
        if f < len(acts[stage]) and f - b < caps[stage]:
            later = SAME_MOMENT * (prefer == "backward")
            found.append((max(free[stage], acts[stage][f]) + later, stage, Op.FORWARD))
        return found

    # What starts first is settled first: nothing that is not known yet can come before it.
    while ready := [option for k in range(K) for option in options(k)]:
        _, k, op = min(ready, key=lambda option: option[:2])
        if op is Op.FORWARD:
            b = num_forward[k]
            end = spend(k, Action(op, b), max(free[k], acts[k][b]))
            num_forward[k] += 1
            if k < K - 1:
                acts[k + 1].append(end + costs.between(k, k + 1))
            else:
                grads[k].append(end)
        else:
            b = num_backward[k]
            end = spend(k, Action(op, b), max(free[k], grads[k][b]))
            num_backward[k] += 1
            if k > 0:
                grads[k - 1].append(end + costs.between(k, k - 1))
            if (b + 1) % accumulation_steps == 0 or b + 1 == N:
                spend(k, Action(Op.UPDATE, b // accumulation_steps), end)
    return spans


def simulate_synchronous(costs: Costs, *, num_micro_batches: int, slowdown: Slowdown = at_full_speed) -> float:
    """Time of so many slots if all stages meet after each, as in the loop of the authors' code.

    In a slot every stage does one forward and one backward; the slowest decides. Filling, draining and links are
    left out.
    """
    K = len(costs.forward)

    def slot(b: int) -> float:
        return max(
            sum(costs.of(k, op) * slowdown(k, Action(op, b)) for op in (Op.FORWARD, Op.BACKWARD)) for k in range(K)
        )

    return sum(slot(b) for b in range(num_micro_batches))
