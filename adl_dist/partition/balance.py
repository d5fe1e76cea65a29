"""The best contiguous cut into stages for measured costs.

A full pipeline goes at the pace of its slowest part, a stage or a link. The best cut makes that part as fast as can
be, and each of its stages fits into the memory of its device. It is found exactly, by dynamic programming from the
last stage to the first, in K n^2 steps for K stages and n units:

    best[k][i] = min over j > i of max(seconds of stage k with units i..j-1, seconds of the link at j, best[k+1][j])
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition.costs import (
    Floats,
    Machine,
    StageFootprint,
    UnitCost,
    busy_at_borders,
    bytes_at_borders,
    bytes_of,
    link_time,
    seconds_of,
    stage_memory,
    stage_time,
    unit_work,
)

__all__ = [
    "Balance",
    "Machine",
    "StageFootprint",
    "UnitCost",
    "best_balance",
    "evaluate_balance",
    "link_time",
    "stage_memory",
    "stage_time",
]

UNIFORM = Machine()  # equal devices, no limits


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A cut and what it costs.

    Attributes:
        sizes: units of each stage.
        seconds: time of the slowest stage or link, for one micro-batch.
        stage_seconds: time of each stage.
        link_seconds: time of the link after each stage but the last.
        stage_bytes: memory of each stage.
    """

    sizes: list[int]
    seconds: float
    stage_seconds: list[float]
    link_seconds: list[float]
    stage_bytes: list[int]


def best_balance(
    units: Sequence[UnitCost],
    *,
    num_stages: int,
    held: Sequence[StageFootprint],
    machine: Machine = UNIFORM,
    optimizer_copies: float = 1.0,
) -> Balance:
    """Return the cut whose slowest stage or link is fastest, among all whose stages fit into memory.

    Of several it is the one that sends least, and of these the one with the lexicographically smallest sizes.

    Args:
        units: the model's units, in the order they run.
        num_stages: K.
        held: what each stage holds.
        machine: the devices and links.
        optimizer_copies: tensors of the optimizer's state per parameter.

    Raises:
        PartitionError: fewer possible cuts than K-1, or none whose stages fit into memory.
        ConfigError: lists that do not fit the number of stages.
    """
    speeds, limits = _of_each_device(num_stages, held, machine)
    _check_places(units, num_stages)
    busy = np.array(busy_at_borders(units, machine))
    work, kept = _maxima([unit.work_bytes for unit in units]), _sums([unit.activation_bytes for unit in units])
    parameters = _sums([unit.parameter_bytes for unit in units])
    holds_units = np.tri(len(units), dtype=bool).T

    def excess(k: int) -> Floats:
        """Return the bytes of stage k beyond its limit."""
        came_in, start_held, start_buffers, stop_buffers = map(np.array, bytes_at_borders(units, held[k]))
        messages = start_buffers[:-1, None] + stop_buffers[1:] + work
        activations = kept + start_held[:-1, None]
        needed = bytes_of(activations, parameters, came_in[:-1, None], messages, held[k], optimizer_copies)
        return np.where(holds_units, needed - limits[k], math.inf)

    def seconds(k: int) -> Floats:
        """Return the seconds of stage k; infinite where it does not fit."""
        work = _sums([unit_work(unit, held[k]) for unit in units])
        return np.where(excess(k) <= 0, seconds_of(work, busy[:-1, None], busy[1:], speeds[k]), math.inf)

    may_cut = np.array([unit.may_cut for unit in units[:-1]], dtype=bool)
    links = np.where(may_cut, [link_time(unit, machine) for unit in units[:-1]], math.inf)
    bottleneck, _ = _best(num_stages, seconds, links, np.maximum)
    if bottleneck == math.inf:
        _, sizes = _best(num_stages, excess, np.where(may_cut, -math.inf, math.inf), np.maximum)
        closest = evaluate_balance(units, sizes, held=held, machine=machine, optimizer_copies=optimizer_copies)
        raise _too_large(closest, limits, held)
    bytes_sent = np.array([unit.act_bytes + unit.grad_bytes for unit in units[:-1]])
    _, sizes = _best(
        num_stages,
        lambda k: np.where(seconds(k) <= bottleneck, 0.0, math.inf),
        np.where(links <= bottleneck, bytes_sent, math.inf),
        np.add,
    )
    return evaluate_balance(units, sizes, held=held, machine=machine, optimizer_copies=optimizer_copies)


def evaluate_balance(
    units: Sequence[UnitCost],
    sizes: Sequence[int],
    *,
    held: Sequence[StageFootprint],
    machine: Machine = UNIFORM,
    optimizer_copies: float = 1.0,
) -> Balance:
    """Return the costs of a given cut, whether it fits into memory or not; arguments as for :func:`best_balance`.

    Raises:
        PartitionError: sizes that do not add up, or a cut where none is possible.
        ConfigError: lists that do not fit the number of stages.
    """
    speeds, _ = _of_each_device(len(sizes), held, machine)
    if sum(sizes) != len(units) or min(sizes) < 1:
        raise PartitionError(
            f"partition.balance={list(sizes)} does not fit: expected {len(sizes)} numbers, each at least 1, that add "
            f"up to the model's {len(units)} units, got a sum of {sum(sizes)}"
        )
    borders = [0, *accumulate(sizes)]
    last_units = [units[border - 1] for border in borders[1:-1]]
    for unit in last_units:
        if not unit.may_cut:
            raise PartitionError(
                f"partition.balance={list(sizes)} cuts the model right after '{unit.name}', where it cannot be cut; "
                "move that cut, or use partition.balance=auto"
            )
    stages = list(zip(pairwise(borders), held, speeds, strict=True))
    stage_seconds = [stage_time(units, *ends, held=h, speed=speed, machine=machine) for ends, h, speed in stages]
    link_seconds = [link_time(unit, machine) for unit in last_units]
    return Balance(
        sizes=list(sizes),
        seconds=max(stage_seconds + link_seconds),
        stage_seconds=stage_seconds,
        link_seconds=link_seconds,
        stage_bytes=[stage_memory(units, *ends, held=h, optimizer_copies=optimizer_copies) for ends, h, _ in stages],
    )


def _best(
    num_stages: int, stage: Callable[[int], Floats], cut: Floats, join: Callable[[Floats, Floats], Floats]
) -> tuple[float, list[int]]:
    """Return the least that the costs of all stages and cuts can be joined to, and sizes that reach it.

    Of several cuts it follows, from the first stage on, the earliest whose rest is the best rest: with ``np.add`` that
    is the lexicographically smallest of all the best.

    Args:
        num_stages: K.
        stage: the costs [n, n] of stage k, by its first and its last unit; asked for one at a time, as they are large.
        cut: the cost [n - 1] of a cut right after each unit but the last.
        join: ``np.maximum`` or ``np.add``.
    """
    rest = stage(num_stages - 1)[:, -1]
    last_units: list[NDArray[np.intp]] = []  # of each stage but the last, by its first unit
    for k in reversed(range(num_stages - 1)):
        options = join(stage(k)[:, :-1], join(cut, rest[1:]))
        rest = options.min(axis=1)
        last_units.insert(0, options.argmin(axis=1))
    borders = [0]
    for last_unit in last_units:
        borders.append(int(last_unit[borders[-1]]) + 1)
    return float(rest[0]), [stop - start for start, stop in pairwise([*borders, len(rest)])]


def _sums(values: Sequence[float]) -> Floats:
    """Entry [i, j] is the sum of values i to j, added from left to right as :func:`stage_time` does."""
    return np.cumsum(np.triu(np.tile(np.array(values, dtype=np.float64), (len(values), 1))), axis=1)


def _maxima(values: Sequence[float]) -> Floats:
    """Entry [i, j] is the largest of values i to j."""
    return np.maximum.accumulate(np.triu(np.tile(np.array(values, dtype=np.float64), (len(values), 1))), axis=1)


def _of_each_device(
    num_stages: int, held: Sequence[StageFootprint], machine: Machine
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the speed and the memory limit of each stage's device."""
    speeds = [1.0] * num_stages if machine.speeds is None else machine.speeds
    limit = math.inf if machine.memory_bytes is None else machine.memory_bytes
    limits: Sequence[float] = limit if isinstance(limit, Sequence) else [limit] * num_stages
    for name, values in (("machine.speeds", speeds), ("machine.memory_bytes", limits), ("held", held)):
        if len(values) != num_stages or not values:
            raise ConfigError(f"{name}={list(values)} has {len(values)} entries, but there are {num_stages} stages")
    return speeds, limits


def _check_places(units: Sequence[UnitCost], num_stages: int) -> None:
    places = [unit.name for unit in units[:-1] if unit.may_cut]
    if not units or len(places) < num_stages - 1:
        names = ", ".join(places[:8] + ["..."] * (len(places) > 8)) or "none"
        raise PartitionError(
            f"partition.num_stages={num_stages} needs {num_stages - 1} cuts, but the model of {len(units)} units can "
            f"be cut in {len(places)} places only (after: {names}); use at most "
            f"partition.num_stages={len(places) + 1}, or a model of more blocks"
        )


def _too_large(closest: Balance, limits: Sequence[float], held: Sequence[StageFootprint]) -> PartitionError:
    needs = closest.stage_bytes
    k = max(range(len(needs)), key=lambda k: needs[k] - limits[k])
    ways_out = ["more stages (partition.num_stages)", "smaller micro-batches (train.batch_size)"]
    if not any(h.recomputes for h in held):
        ways_out.append("method.weights=recompute")
    return PartitionError(
        f"no cut into {len(needs)} stages fits into memory: partition.balance={closest.sizes}, which exceeds it least, "
        f"needs {needs[k]:,} bytes on stage {k} (micro-batches with all activations: {held[k].graphs}, "
        f"versions of its weights: {1 + held[k].weight_copies}), whose device has {limits[k]:,}; use "
        f"{' or '.join(ways_out)}"
    )
