"""Costs of units and stages, and properties of devices and links."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adl_dist.codecs import NO_CODING, PLAIN, Codecs, CodingCost, PerMessage
from adl_dist.errors import ConfigError, PartitionError, in_one_line
from adl_dist.schedule.pipeline import RECEIVED_AHEAD

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """The costs of one unit for one micro-batch, in seconds and bytes.

    A unit is a layer or a block.
    """

    name: str
    forward: float
    backward: float
    loading: float = 0.0  # the part of the forward in which the stage loads data; not measured, see Profile.costs
    backward_weight: float = 0.0  # the part of the backward that a split can defer
    split: float = 0.0  # additional seconds of a backward in two parts
    update: float = 0.0  # its part of the end of a group (norm, step, cleared gradients), divided by M already
    update_fixed: float = 0.0  # its fixed part in any stage that has weights; divided likewise
    copy: float = 0.0  # to copy its trained weights, once a group; divided likewise
    parameter_bytes: int = 0  # its parameters, except those that an earlier unit also has
    # Trained parameters that an earlier unit also has: for each such unit its index and their bytes. Two stages that
    # hold one of both units each have a copy each, and sum their gradients.
    tied: Sequence[Sequence[int]] = field(default_factory=list)
    activation_bytes: int = 0  # kept from the forward to the backward
    # Needed during its backward: gradients of its parameters, as a kernel makes them and as they are kept (oneDNN's
    # convolutions have a format of their own), of what comes in and of what goes out.
    work_bytes: int = 0
    deferred_bytes: int = 0  # kept for the part of its backward that is deferred
    # Of a cut right after the unit:
    held_before: int = 0  # sent over it, and kept by no graph before it
    held_behind: int = 0  # each graph after it holds so many crossing bytes, apart from its activations
    act_bytes: int = 0  # all tensors that cross it, forward, as they are sent
    widened_bytes: int = 0  # their growth when they are decoded
    grad_bytes: int = 0  # the gradients that come back; 0 if there are none
    num_tensors: int = 1  # tensors that cross it; as many gradients come back
    # By codec, the bytes by which it makes these smaller, of activations and of gradients alike.
    spared: Mapping[str, int] = field(default_factory=dict)
    act_coding: float = 0.0  # seconds for which each of the two stages is busy to code or to decode activations
    grad_coding: float = 0.0  # likewise, gradients
    may_cut: bool = True  # whether it is possible at all
    reason: str = ""  # why it is not

    def coded(self, codecs: Codecs, coding: Mapping[str, CodingCost]) -> "UnitCost":
        """Return the costs for activations and gradients coded by ``codecs``."""
        act, grad = codecs
        if codecs == PLAIN:
            return self
        act_spared, grad_spared = self.spared.get(act, 0), self.spared.get(grad, 0) if self.grad_bytes else 0
        return replace(
            self,
            act_bytes=self.act_bytes - act_spared,
            widened_bytes=act_spared,
            grad_bytes=self.grad_bytes - grad_spared,
            held_before=self.held_before if act == "none" else self.act_bytes - act_spared,
            act_coding=coding.get(act, NO_CODING).acts.of(self.act_bytes) / 2,
            grad_coding=coding.get(grad, NO_CODING).grads.of(self.grad_bytes) / 2,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of one micro-batch, in seconds."""

    of: dict[str, Any]  # the only model, batch, device, threads and versions that the costs hold for
    units: list[UnitCost]  # the chain's units; work done once a group has the whole group's time, not divided by M
    forward: float  # of the whole model at once, with the loss
    backward: float  # likewise
    optimizer_copies: float  # bytes of the optimizer's state, for each byte of parameters
    split_slowdown: float = 1.0  # of forward and backward together, where the backward is done in two parts
    coding: Mapping[str, CodingCost] = field(default_factory=dict)  # as Machine has it; empty if nothing is coded
    loading: float = 0.0  # for which stage 0 loads data; 0 if others load it
    loaded: "Profile | None" = None  # measured while the other devices work; None if they do not disturb

    def with_stages(self, num_stages: int) -> "Profile":
        """Return the profile for K stages that work at the same time."""
        return self if num_stages == 1 or self.loaded is None else self.loaded

    @property
    def share_deferrable(self) -> float:
        """The share of the backward that a split can defer."""
        units = self.costs(1)
        return sum(unit.backward_weight for unit in units) / max(sum(unit.backward for unit in units), 1e-12)

    def costs(self, accumulation_steps: int) -> list[UnitCost]:
        """Return the units' costs with M micro-batches per update.

        Forward and backward seconds are scaled to add up to those of the whole model. Units measured one by one take a
        little longer than together, because each is called and timed by itself.
        """
        forward = self.forward / sum(unit.forward for unit in self.units)
        in_all = max(sum(unit.backward for unit in self.units), 1e-12)
        backward, split = self.backward / in_all, (self.split_slowdown - 1) * (self.forward + self.backward) / in_all
        return [
            replace(
                unit,
                forward=unit.forward * forward + (0.0 if place else self.loading),
                loading=0.0 if place else self.loading,
                backward=unit.backward * backward,
                backward_weight=min(unit.backward_weight, unit.backward) * backward,
                split=unit.backward * split,
                update=unit.update / accumulation_steps,
                update_fixed=unit.update_fixed / accumulation_steps,
                copy=unit.copy / accumulation_steps,
            )
            for place, unit in enumerate(self.units)
        ]

    def save(self, path: Path) -> None:
        """Write the profile as JSON, atomically."""
        unfinished = path.with_name(f".{path.name}.saving")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path, of: Mapping[str, Any] | None = None) -> "Profile | None":
        """Read a profile written by :meth:`save`; raise PartitionError otherwise.

        Return None if the measurement described by ``of`` differs, for example in the model, the device or a version.
        Without ``of``, the result is never None.
        """
        try:
            values = json.loads(path.read_text())
            return cls._of(values) if of in (None, values["of"]) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PartitionError(
                f"{path} is not a profile ({in_one_line(error)}); remove it to measure again"
            ) from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> "Profile":
        loaded = None if values["loaded"] is None else cls._of(values["loaded"])
        units = [UnitCost(**unit) for unit in values["units"]]
        coding = {codec: CodingCost(*(PerMessage(*one) for one in both)) for codec, both in values["coding"].items()}
        return cls(**{**values, "units": units, "coding": coding, "loaded": loaded})


@dataclass(frozen=True, kw_only=True)
class StageFootprint:
    """The peak counts of a stage's activations, messages and copies."""

    graphs: int  # micro-batches with all their activations; 2(K-1-k)+1 of ADL
    inputs: int = 0  # micro-batches with only their incoming activations
    acts_received: int = 1 + RECEIVED_AHEAD  # one taken, and those whose receives are posted
    grads_received: int = 1 + RECEIVED_AHEAD  # likewise
    acts_sent: int = 1  # messages downstream that are kept until they are known to have left
    grads_sent: int = 1  # messages upstream that are kept so
    weight_copies: int = 0  # weight versions in addition to the newest
    gradient_copies: int = 0  # further sets: each version that a group's micro-batches used gathers its own
    deferred: int = 0  # micro-batches whose gradients of weights are deferred
    recomputes: float = 0.0  # share of the micro-batches that are forwarded twice
    copies_per_update: int = 0  # of its weights, made at each update
    targets: int = 0  # messages of targets that it sends or receives for each micro-batch
    sums: int = 0  # gradients of tied weights that wait for their update, are on their way, or are being applied
    micro_batches: int = 1  # of an update, for each of which gradients of tied weights are summed once


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices, and the links between them."""

    speeds: Sequence[float] | None = None  # of each stage's device, relative to the measuring one; all 1 if None
    memory_bytes: int | None = None  # of each device; no limit if None
    # Of the link after each stage, or one number for all: bytes per second, each direction for itself,
    bandwidth: float | Sequence[float] = math.inf
    latency: float | Sequence[float] = 0.0  # seconds of a message on its way; no cut is chosen by it, see link_times
    shares_link: bool = False  # whether a device has one link of that bandwidth, which is then a number, to all others
    seconds_per_byte: float = 0.0  # for which a stage itself is busy, sent or received (gloo on CPU copies)
    seconds_per_message: float = 0.0  # for which it is busy with each tensor, whatever its size
    codecs: Codecs = PLAIN  # the codecs of activations and gradients on links
    coding: Mapping[str, CodingCost] = field(default_factory=dict)  # by codec, the seconds to code and to decode

    def bandwidth_after(self, stage: int) -> float:
        """Return the bandwidth of the link after ``stage``, in bytes per second."""
        return self.bandwidth[stage] if isinstance(self.bandwidth, Sequence) else self.bandwidth

    def latency_after(self, stage: int) -> float:
        """Return the latency of the link after ``stage``, in seconds."""
        return self.latency[stage] if isinstance(self.latency, Sequence) else self.latency

    def with_own_links(self, num_processes: int) -> "Machine":
        """Return the machine with a separate link to each neighbour.

        With ``shares_link`` and more than two processes, each link gets half of the bandwidth.
        """
        if not self.shares_link or num_processes <= 2:
            return replace(self, shares_link=False)
        return replace(self.with_links_slower(2), shares_link=False)

    def with_links_slower(self, factor: float) -> "Machine":
        """Return the same devices with links of 1/``factor`` of the bandwidth."""
        bandwidth = self.bandwidth
        slower = [one / factor for one in bandwidth] if isinstance(bandwidth, Sequence) else bandwidth / factor
        return replace(self, bandwidth=slower)

    @property
    def slowest_link(self) -> tuple[float, float]:
        """The least bandwidth and the longest latency of all links."""
        return min(_listed(self.bandwidth)), max(_listed(self.latency))

    def speeds_of(self, num_stages: int) -> Sequence[float]:
        """Return the speed of each stage's device, or raise a ConfigError."""
        speeds = [1.0] * num_stages if self.speeds is None else [*self.speeds]
        if len(speeds) != num_stages:
            raise ConfigError(
                f"partition.device_speeds={speeds} must have one number per stage, {num_stages}, got {len(speeds)}"
            )
        return speeds


def _listed(value: float | Sequence[float]) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value]


def link_times(unit: UnitCost, machine: Machine, stage: int) -> tuple[float, float]:
    """Return a link's busy seconds for (one activation, one gradient).

    The link is the one after ``stage``, and ``unit`` is the last unit of that stage. Activations and gradients travel
    in opposite directions, which do not slow each other down.

    The latency is left out: receives are posted ahead and no stage waits for a send, so the next message leaves while
    one is on its way. :func:`adl_dist.schedule.speed` gives its cost where the method's delays leave no room for it.
    """
    return unit.act_bytes / machine.bandwidth_after(stage), unit.grad_bytes / machine.bandwidth_after(stage)


def stage_seconds(units: Sequence[UnitCost], *, held: StageFootprint, speed: float, machine: Machine) -> Floats:
    """Return the busy seconds [n, n] of a stage for one micro-batch.

    The indices are the first and the last unit of the stage. Counted are its units' work, at the ``speed`` of its
    device, and its part in the messages at both ends, except at the model's ends. The seconds of units are added from
    left to right, not as a difference of sums that start elsewhere, so equal costs tie to the last bit.
    """
    is_split = held.deferred > 0
    again = [held.recomputes * (unit.forward - unit.loading) for unit in units]
    work = _of_stages(
        np.add, [u.forward + a + u.backward + is_split * u.split + u.update for u, a in zip(units, again, strict=True)]
    )
    once = _of_stages(np.maximum, [unit.update_fixed for unit in units])
    once = once + held.copies_per_update * _of_stages(np.add, [unit.copy for unit in units])
    targets = held.targets * machine.seconds_per_message
    of_copies, of_sums = tied_seconds(units, machine)
    of_sums = of_sums / held.micro_batches
    busy = [
        machine.seconds_per_byte * (unit.act_bytes + unit.grad_bytes)
        + unit.act_coding
        + unit.grad_coding
        + machine.seconds_per_message * unit.num_tensors * (2 if unit.grad_bytes else 1)
        for unit in units
    ]
    return (work + once + of_copies) / speed + of_sums + targets + _at_starts(busy) + _at_stops(busy)


def update_seconds(units: Sequence[UnitCost], *, copies: int = 0) -> float:
    """Return the seconds at the end of a group, for a stage of ``units``.

    If ``UnitCost.update`` is divided by M, so is the result. ``copies`` weight copies are made at each update.
    """
    fixed = max((unit.update_fixed for unit in units), default=0.0)
    return fixed + sum(unit.update + copies * unit.copy for unit in units)


def tied_seconds(units: Sequence[UnitCost], machine: Machine) -> tuple[Floats, Floats]:
    """Return the seconds for (updates, gradient sums) of tied copies.

    Both are [n, n], by the first and the last unit of a stage. Updates are divided by M, as ``UnitCost.update``; sums
    are per update. A stage of a tie sends its part and receives the sum, or the other way round.
    """

    def of_copy(first: UnitCost, nbytes: int) -> float:
        return first.update * nbytes / first.parameter_bytes

    def of_sum(first: UnitCost, nbytes: int) -> float:
        return 2 * (machine.seconds_per_byte * nbytes + machine.seconds_per_message)

    return _of_ties(units, later=of_copy), _of_ties(units, first=of_sum, later=of_sum)


def stage_bytes(units: Sequence[UnitCost], *, held: StageFootprint, optimizer_copies: float) -> Floats:
    """Return the peak bytes [n, n] of a stage, rounded up.

    The indices are the first and the last unit of the stage. Counted are (1) the activations and inputs of each graph,
    and stored inputs; (2) parameters as weights, gradients, optimizer state, and older versions with their gradients;
    (3) buffers of received and posted messages, and of sent messages that no graph keeps; (4) tensors for deferred
    gradients; (5) copies of tied weights, and their summed gradients; (6) the work of one backward. A model input
    counts in the unit that keeps it.
    """
    # A graph that is replayed has made outputs of its own. One message at least: the newest, before it is kept.
    in_graphs = 0 if held.recomputes else min(held.acts_sent, held.graphs)
    in_buffers = max(1, held.acts_sent - in_graphs)
    came_in = _at_starts([unit.act_bytes + unit.widened_bytes for unit in units])
    before = [held.acts_received * unit.act_bytes + held.grads_sent * unit.grad_bytes for unit in units]
    after = [held.grads_received * u.grad_bytes + in_graphs * u.held_before + in_buffers * u.act_bytes for u in units]
    messages = _at_starts(before) + _at_stops(after)
    activations = _of_stages(np.add, [unit.activation_bytes for unit in units])
    activations = activations + _at_starts([unit.held_behind for unit in units])
    work = _of_stages(np.maximum, [unit.work_bytes for unit in units])
    copies = 1 + 1 + optimizer_copies + held.weight_copies + held.gradient_copies  # weights and gradients first
    parameters = copies * _of_stages(np.add, [unit.parameter_bytes for unit in units])
    tied = _of_ties(
        units, first=lambda _, nbytes: held.sums * nbytes, later=lambda _, nbytes: (copies + held.sums) * nbytes
    )
    deferred = held.deferred * _of_stages(np.add, [unit.deferred_bytes for unit in units])
    return np.ceil(held.graphs * activations + held.inputs * came_in + parameters + tied + messages + deferred + work)


OfTie = Callable[[UnitCost, int], float]  # of the first unit of a tie, and the bytes of its weights


def _of_ties(units: Sequence[UnitCost], *, first: OfTie = lambda unit, nbytes: 0.0, later: OfTie) -> Floats:
    """Return the extra cost [n, n] of tied weights.

    ``first`` gives the cost of a stage with only the first unit of a tie, ``later`` of one with only a later unit.
    """
    added = np.zeros((len(units), len(units)))
    for place, unit in enumerate(units):
        for other, nbytes in unit.tied:
            added[: other + 1, other:place] += first(units[other], nbytes)
            added[other + 1 : place + 1, place:] += later(units[other], nbytes)
    return added


def _at_starts(values: Sequence[float]) -> Floats:
    """Return [n, 1]: for each first unit the value of the unit before, or 0."""
    return np.array([0.0, *values[:-1]])[:, None]


def _at_stops(values: Sequence[float]) -> Floats:
    """Return [n]: the value of a stage by its last unit, 0 at the model's end."""
    return np.array([*values[:-1], 0.0])


def _of_stages(join: np.ufunc, values: Sequence[float]) -> Floats:
    """Return [n, n]: entry [i, j] joins the values i to j, in order."""
    rows = np.triu(np.tile(np.array(values, dtype=np.float64), (len(values), 1)))
    joined: Floats = join.accumulate(rows, axis=1)
    return joined
