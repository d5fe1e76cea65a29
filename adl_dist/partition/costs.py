"""The costs of a stage and a link, from those of the model's units.

Every figure of a stage comes from the same roundings: the seconds of its units are summed from left to
right, never as a difference of two sums that start elsewhere, and bytes are whole numbers below 2**53, which floats
hold exactly. So the figures of one stage and those of all stages that could be (:mod:`adl_dist.partition.balance`
weighs them) are equal to the last bit, and are compared without a tolerance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from adl_dist.errors import ConfigError

Floats = NDArray[np.float64]
Figure = TypeVar("Figure", float, Floats)  # of one stage, or of many

RECEIVED = 3  # messages that a stage holds of what it receives: one taken, two posted ahead


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """The costs of one unit (a layer, or block) of the model for one micro-batch.

    Attributes:
        name: the unit's name.
        forward: seconds.
        backward: seconds.
        update: seconds of its share of what ends a group (norm, step, cleared gradients), divided by M already.
        parameter_bytes: size of its parameters, once.
        activation_bytes: kept from the forward to the backward.
        work_bytes: needed during its backward: gradients of its parameters, as a kernel makes them and as they are
            kept (oneDNN's convolutions have a format of their own), of what comes in and of what goes out.
        held_before: bytes sent over a cut right after the unit that no graph before it keeps.
        held_behind: bytes that each graph after the cut holds of it, apart from its activations.
        act_bytes: size of all tensors that cross a cut right after the unit, forward, as they are sent.
        widened_bytes: their growth when they are handed over (``wire_dtype``).
        grad_bytes: size of the gradients that come back over that cut; 0: none do.
        num_tensors: number of tensors that cross that cut; as many gradients come back.
        may_cut: whether a cut right after the unit is possible at all.

    Raises:
        ConfigError: a number that is negative or not finite.
    """

    name: str
    forward: float
    backward: float
    update: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    work_bytes: int = 0
    held_before: int = 0
    held_behind: int = 0
    act_bytes: int = 0
    widened_bytes: int = 0
    grad_bytes: int = 0
    num_tensors: int = 1
    may_cut: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "name":
                _at_least_0(f"unit '{self.name}': {field.name}", getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class StageFootprint:
    """The most that a method makes one stage hold.

    Attributes:
        graphs: micro-batches with all their activations; 2(K-1-k)+1 of ADL.
        inputs: micro-batches with nothing but what came in.
        acts_sent: messages downstream that are kept until they are known to have left.
        grads_sent: messages upstream that are kept so.
        weight_copies: weight versions in addition to the newest.
        gradient_copies: further sets of gradients: each version that a group's micro-batches used gathers its own.
        recomputes: share of the micro-batches that are forwarded twice.
    """

    graphs: int
    inputs: int = 0
    acts_sent: int = 1
    grads_sent: int = 1
    weight_copies: int = 0
    gradient_copies: int = 0
    recomputes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices, and the links between two of them.

    Attributes:
        speeds: speed of each stage's device, relative to the one on which units were measured; None: all 1.
        memory_bytes: memory of each device, or one number for all; None: no limit.
        bandwidth: bytes per second of a link, each direction for itself.
        latency: seconds of a message on its way; no cut is chosen by it, see :func:`link_time`.
        seconds_per_byte: time that a stage itself needs for each byte it sends or receives (gloo on CPU copies).
        seconds_per_message: time that it needs for each tensor, whatever its size.

    Raises:
        ConfigError: a speed or bandwidth that is not above 0, or a time that is below.
    """

    speeds: Sequence[float] | None = None
    memory_bytes: int | Sequence[int] | None = None
    bandwidth: float = math.inf
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    seconds_per_message: float = 0.0

    def __post_init__(self) -> None:
        if any(not 0 < speed < math.inf for speed in self.speeds or ()):
            raise ConfigError(f"machine.speeds must be finite and above 0, got {self.speeds}")
        if not self.bandwidth > 0:
            raise ConfigError(f"machine.bandwidth must be above 0, got {self.bandwidth}")
        for name in ("latency", "seconds_per_byte", "seconds_per_message"):
            _at_least_0(f"machine.{name}", getattr(self, name))


def stage_time(
    units: Sequence[UnitCost], start: int, stop: int, *, held: StageFootprint, speed: float, machine: Machine
) -> float:
    """Return the seconds for which a stage of ``units[start:stop]`` is busy with one micro-batch.

    The work on its units, at the ``speed`` of its device, and its own part in the messages over both of its ends.
    Nothing crosses before the first unit and after the last.
    """
    *_, work = accumulate(unit_work(unit, held) for unit in units[start:stop])  # Python 3.12's sum() rounds otherwise
    busy = busy_at_borders(units, machine)
    return seconds_of(work, busy[start], busy[stop], speed)


def link_time(unit: UnitCost, machine: Machine) -> float:
    """Return the seconds for which a link after ``unit`` is occupied by one micro-batch, in its busier direction.

    Bytes over bandwidth, without the latency: receives are posted ahead and no stage waits for a send, so the next
    message leaves while one is on its way. Latency delays all of them alike; it makes the pipeline longer to fill, but
    not slower, while the method's delays leave room for it. What it costs where they do not, the timing model says
    (:func:`adl_dist.schedule.speed`).
    """
    return max(unit.act_bytes, unit.grad_bytes) / machine.bandwidth


def stage_memory(
    units: Sequence[UnitCost], start: int, stop: int, *, held: StageFootprint, optimizer_copies: float
) -> int:
    """Return the bytes that a stage of ``units[start:stop]`` holds at most.

    The activations of each graph and what it holds of what came in, what came in of each input; the parameters as
    weights, as gradients, as each copy of the optimizer, as each older version and its gradients; and the buffers of
    messages, three of each received and those sent that are kept, unless a graph keeps them anyway; and the work of one
    backward at a time.
    What comes into the model itself is counted where a unit keeps it.

    Args:
        units: the whole model's units.
        start: the stage's first.
        stop: the first unit of the next stage.
        held: what the stage holds.
        optimizer_copies: tensors of the optimizer's state per parameter: 1 of SGD with momentum, 2 of Adam.
    """
    activations = float(sum(unit.activation_bytes for unit in units[start:stop]))
    parameters = float(sum(unit.parameter_bytes for unit in units[start:stop]))
    at = bytes_at_borders(units, held)
    messages = at.start_buffers[start] + at.stop_buffers[stop] + max(unit.work_bytes for unit in units[start:stop])
    activations += at.start_held[start]
    return math.ceil(bytes_of(activations, parameters, at.came_in[start], messages, held, optimizer_copies))


def seconds_of(work: Figure, busy_at_start: Figure, busy_at_stop: Figure, speed: float) -> Figure:
    """Return a stage's seconds: its work on a device of ``speed``, and the messages at its two ends."""
    return work / speed + busy_at_start + busy_at_stop


def bytes_of(
    activations: Figure,
    parameters: Figure,
    came_in: Figure,
    messages: Figure,
    held: StageFootprint,
    optimizer_copies: float,
) -> Figure:
    """Return a stage's bytes; see :func:`stage_memory`."""
    copies = 1 + 1 + optimizer_copies + held.weight_copies + held.gradient_copies  # weights and gradients first
    return held.graphs * activations + held.inputs * came_in + copies * parameters + messages


def unit_work(unit: UnitCost, held: StageFootprint) -> float:
    """Return the seconds that a stage of speed 1 works on ``unit`` for one micro-batch."""
    return unit.forward * (1 + held.recomputes) + unit.backward + unit.update


def busy_at_borders(units: Sequence[UnitCost], machine: Machine) -> list[float]:
    """Return the seconds that a stage which starts or stops before unit 0, 1, .. n is busy with messages there."""

    def busy(unit: UnitCost) -> float:
        num_messages = unit.num_tensors * (2 if unit.grad_bytes else 1)
        sent = unit.act_bytes + unit.grad_bytes
        return machine.seconds_per_byte * sent + machine.seconds_per_message * num_messages

    return _at_borders(units, busy)


class BorderBytes(NamedTuple):
    """Bytes that a stage holds because it starts or stops before unit 0, 1, .. n."""

    came_in: list[float]  # of one micro-batch
    start_held: list[float]  # by each graph
    start_buffers: list[float]  # acts received, gradients sent
    stop_buffers: list[float]  # gradients received, acts sent


def bytes_at_borders(units: Sequence[UnitCost], held: StageFootprint) -> BorderBytes:
    """Return the bytes at each border between two units, as a stage on either side of it holds them."""

    def acts_sent(unit: UnitCost) -> float:
        # A graph that is replayed has made outputs of its own. One message at least: the newest, before it is kept.
        in_graphs = 0 if held.recomputes else min(held.acts_sent, held.graphs)
        return in_graphs * unit.held_before + max(1, held.acts_sent - in_graphs) * unit.act_bytes

    return BorderBytes(
        came_in=_at_borders(units, lambda unit: unit.act_bytes + unit.widened_bytes),
        start_held=_at_borders(units, lambda unit: unit.held_behind),
        start_buffers=_at_borders(units, lambda unit: RECEIVED * unit.act_bytes + held.grads_sent * unit.grad_bytes),
        stop_buffers=_at_borders(units, lambda unit: RECEIVED * unit.grad_bytes + acts_sent(unit)),
    )


def _at_borders(units: Sequence[UnitCost], of: Callable[[UnitCost], float]) -> list[float]:
    return [0.0, *(float(of(unit)) for unit in units[:-1]), 0.0]


def _at_least_0(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be finite and at least 0, got {value}")
