"""The best contiguous cut into stages for measured costs.

In a full pipeline the slowest part, a stage or a link, sets the pace. The best cut makes this part as fast as possible
while each stage fits into the memory of its device. Dynamic programming from the last stage to the first finds the best
cut exactly, in K n^2 steps for K stages and n units:

    best[k][i] = min over j > i of max(seconds of stage k with units i..j-1, seconds of the link at j, best[k+1][j])
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from adl_dist.errors import PartitionError
from adl_dist.partition.costs import Floats, Machine, StageFootprint, UnitCost, link_times, stage_bytes, stage_seconds
from adl_dist.partition.imbalance import usual

UNIFORM = Machine()  # equal devices, no limits


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A cut and its costs."""

    sizes: list[int]  # units of each stage
    seconds: float  # of the slowest stage or link, for one micro-batch
    stage_seconds: list[float]
    fixed_seconds: list[float]  # of these, the fixed part of a group's end: one device has it once
    link_seconds: list[float]  # of the link after each stage but the last, in its busier direction
    stage_bytes: list[int]


def best_balance(
    units: Sequence[UnitCost],
    *,
    num_stages: int,
    held: Sequence[StageFootprint],
    machine: Machine = UNIFORM,
    optimizer_copies: float = 1.0,
) -> Balance:
    """Return the fastest cut among those that fit into memory.

    The fastest cut has the fastest slowest part, a stage or a link. If that part is a link, several cuts may be equally
    fast. Of these, the cut with the fastest slowest stage is chosen, then the cut that sends least, then the one with
    the lexicographically smallest sizes. ``held`` has the footprint of each stage, ``optimizer_copies`` the number of
    state tensors per parameter: 1 for SGD with momentum, 2 for Adam.

    Raises:
        PartitionError: If fewer than K-1 places can be cut, or no cut into K stages fits into memory.
        ConfigError: If ``machine`` does not have one speed for each stage.
    """
    places = [unit.name for unit in units[:-1] if unit.may_cut]
    if not units or len(places) < num_stages - 1:
        reason = usual(unit.reason for unit in units[:-1] if not unit.may_cut)
        elsewhere = "" if reason is None else f"; elsewhere not, since {reason}"
        names = ", ".join(places[:8] + ["..."] * (len(places) > 8)) or "none"
        raise PartitionError(
            f"partition.num_stages={num_stages} needs {num_stages - 1} cuts, but the model of {len(units)} units can "
            f"be cut in {len(places)} places only (after: {names}){elsewhere}; use at most "
            f"partition.num_stages={len(places) + 1}, or a model of more blocks"
        )
    evaluated = partial(evaluate_balance, units, held=held, machine=machine, optimizer_copies=optimizer_copies)
    speeds = machine.speeds_of(num_stages)
    limit = math.inf if machine.memory_bytes is None else machine.memory_bytes
    has_units = np.tri(len(units), dtype=bool).T

    def needed(k: int) -> Floats:
        return np.where(has_units, stage_bytes(units, held=held[k], optimizer_copies=optimizer_copies), math.inf)

    def seconds(k: int) -> Floats:  # infinite where the stage does not fit
        busy = stage_seconds(units, held=held[k], speed=speeds[k], machine=machine)
        return np.where(has_units & (needed(k) <= limit), busy, math.inf)

    may_cut = np.array([unit.may_cut for unit in units[:-1]], dtype=bool)

    crossing = [[max(link_times(unit, machine, k)) for unit in units[:-1]] for k in range(num_stages - 1)]
    links = [np.where(may_cut, of_link, math.inf) for of_link in crossing]
    bottleneck, _ = _best(num_stages, seconds, links.__getitem__, np.maximum)
    if bottleneck == math.inf:
        _, sizes = _best(num_stages, needed, lambda k: np.where(may_cut, -math.inf, math.inf), np.maximum)
        raise _too_large(evaluated(sizes), machine, held)
    bytes_sent = np.array([unit.act_bytes + unit.grad_bytes for unit in units[:-1]])

    allowed, slowest_stage = [link <= bottleneck for link in links], bottleneck
    if any(bottleneck in link for link in links):  # else it is a stage
        slowest_stage, _ = _best(num_stages, seconds, lambda k: np.where(allowed[k], -math.inf, math.inf), np.maximum)

    def fast(k: int) -> Floats:
        return np.where(seconds(k) <= slowest_stage, 0.0, math.inf)

    _, sizes = _best(num_stages, fast, lambda k: np.where(allowed[k], bytes_sent, math.inf), np.add)
    return evaluated(sizes)


def evaluate_balance(
    units: Sequence[UnitCost],
    sizes: Sequence[int],
    *,
    held: Sequence[StageFootprint],
    machine: Machine = UNIFORM,
    optimizer_copies: float = 1.0,
) -> Balance:
    """Return the costs of a given cut, even if it does not fit into memory.

    The arguments are those of :func:`best_balance`.

    Raises:
        PartitionError: If the model cannot be cut there.
        ConfigError: If ``machine`` does not have one speed for each stage.
    """
    borders = [0, *accumulate(sizes)]
    last_units = [units[border - 1] for border in borders[1:-1]]
    for unit in last_units:
        if not unit.may_cut:
            raise PartitionError(
                f"the model cannot be cut right after '{unit.name}'{f': {unit.reason}' if unit.reason else ''}; move "
                "that cut, or use partition.balance=auto"
            )
    seconds, fixed, needs = [], [], []
    for (start, stop), footprint, speed in zip(pairwise(borders), held, machine.speeds_of(len(sizes)), strict=True):
        place = start, stop - 1
        seconds.append(float(stage_seconds(units, held=footprint, speed=speed, machine=machine)[place]))
        fixed.append(max(unit.update_fixed for unit in units[start:stop]) / speed)
        needs.append(int(stage_bytes(units, held=footprint, optimizer_copies=optimizer_copies)[place]))
    link_seconds = [max(link_times(unit, machine, k)) for k, unit in enumerate(last_units)]
    return Balance(
        sizes=list(sizes),
        seconds=max(seconds + link_seconds),
        stage_seconds=seconds,
        fixed_seconds=fixed,
        link_seconds=link_seconds,
        stage_bytes=needs,
    )


def _best(
    num_stages: int,
    stage: Callable[[int], Floats],
    cut: Callable[[int], Floats],
    join: Callable[[Floats, Floats], Floats],
) -> tuple[float, list[int]]:
    """Return (least cost of all stages and cuts, units of each stage).

    ``join`` combines costs. ``stage`` returns the costs [n, n] of stage k, by its first and its last unit; they are
    large, so it is called for one stage at a time. ``cut`` returns the costs [n - 1] of a cut between stage k and the
    next, after each unit but the last. Ties go to the smaller stage, from the first stage on. With ``np.add`` this
    gives the lexicographically smallest of the best sizes.
    """
    rest = stage(num_stages - 1)[:, -1]
    last_units: list[NDArray[np.intp]] = []  # of each stage but the last, by its first unit
    for k in reversed(range(num_stages - 1)):
        options = join(stage(k)[:, :-1], join(cut(k), rest[1:]))
        rest = options.min(axis=1)
        last_units.insert(0, options.argmin(axis=1))
    borders = [0]
    for last_unit in last_units:
        borders.append(int(last_unit[borders[-1]]) + 1)
    return float(rest[0]), [stop - start for start, stop in pairwise([*borders, len(rest)])]


def _too_large(balance: Balance, machine: Machine, held: Sequence[StageFootprint]) -> PartitionError:
    needs = balance.stage_bytes
    k = needs.index(max(needs))
    ways_out = ["more stages (partition.num_stages)", "smaller micro-batches (train.batch_size)"]
    if not any(h.recomputes for h in held):
        ways_out.append("method.weights=recompute")
    return PartitionError(
        f"no cut into {len(needs)} stages fits into memory: that of {balance.sizes} units, which exceeds it least, "
        f"needs {needs[k]:,} bytes on stage {k} (micro-batches with all activations: {held[k].graphs}, "
        f"versions of its weights: {1 + held[k].weight_copies}), whose device has {machine.memory_bytes:,}; use "
        f"{' or '.join(ways_out)}"
    )
