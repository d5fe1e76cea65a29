"""Predictions of speed, memory and staleness, and a recommendation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from adl_dist.codecs import CODECS, PLAIN, Codecs
from adl_dist.errors import ConfigError
from adl_dist.partition.balance import UNIFORM, Balance, best_balance, evaluate_balance
from adl_dist.partition.costs import (
    Machine,
    Profile,
    StageFootprint,
    UnitCost,
    link_times,
    tied_seconds,
    update_seconds,
)
from adl_dist.partition.imbalance import why_uneven
from adl_dist.schedule import Costs, Pipeline, max_pending_of, speed
from adl_dist.schedule.actions import Tie
from adl_dist.schedule.least_delays import with_least_delays
from adl_dist.schedule.table import figures
from adl_dist.schedule.timing import time_per_update

# Of the convergence factor: RN-56 at K = 16 trained with M = 4 (factor 4) and diverged with M = 3 (9.2), Table 2a.
MOST_FACTOR = 4.0
MOST_OF_LINKS = 0.1  # share of the time that may go to links before they are called slow
AS_GOOD = 0.03  # a difference in speed that does not count
WORTH_IT = 0.1  # a lead in speed that outweighs staleness, or a pipeline in place of DDP
SLOWER_LINKS = (2, 4, 8)  # factors by which links are slowed to find further cuts


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected speed, memory and staleness of one method on K stages."""

    pipeline: Pipeline
    balance: Balance
    images_per_second: float  # or other samples; in steady state
    seconds_per_update: float  # likewise
    speed_up: float  # over backpropagation of the same micro-batches on one device
    bubble: float  # share of the time in which a stage waits, averaged over stages
    staleness_mean: list[float]  # of each stage, in updates
    link_share: float = 0.0  # share of the time of a micro-batch that links add
    uneven: str | None = None  # why one stage has most of the work, or None
    codecs: Codecs = PLAIN  # the codecs of activations and gradients
    update_bytes: float = 0.0  # over the busiest link in one update, both directions together

    @property
    def convergence_factor(self) -> float:
        """The factor (1 + sum of mean staleness / M) / M in Theorem 1's bound."""
        M = self.pipeline.micro_batches_per_update
        return (1 + sum(self.staleness_mean) / M) / M

    @property
    def is_compute_bound(self) -> bool:
        """True if links add next to nothing to the time of the stages."""
        return self.link_share <= AS_GOOD


def best_cut(
    profile: Profile, pipeline: Pipeline, *, machine: Machine = UNIFORM, sizes: Sequence[int] | None = None
) -> Balance:
    """Return the best cut of the measured model for ``pipeline``.

    If ``sizes`` are given, return the costs of that cut instead; see :func:`best_balance`.

    Where links take time, the slowest part does not decide by itself. A pipeline that flushes also waits for its first
    and last messages, and short delays leave no room for long messages. So cuts for slower links, which send less, are
    tried too, and the timing model chooses among all of them.
    """
    method, M, kept = pipeline.method, pipeline.micro_batches_per_update, max_pending_of(pipeline)
    units = _units(profile, pipeline, machine)
    held = [
        StageFootprint(
            graphs=stage.graphs,
            inputs=stage.inputs,
            acts_received=1 + pipeline.received_ahead(stage.stage - 1),
            grads_received=1 + pipeline.received_ahead(stage.stage),
            acts_sent=kept.get(("act", stage.stage), 0),
            grads_sent=kept.get(("grad", stage.stage), 0),
            weight_copies=stage.weight_copies + stage.history_copies,
            deferred=stage.deferred,
            copies_per_update=stage.copies_per_update,
            targets=int(pipeline.num_stages > 1 and stage.stage in (0, pipeline.num_stages - 1)),
            gradient_copies=len(set(stage.staleness_by_offset)) - 1 if method.weights == "stash" else 0,
            recomputes=sum(method.recomputes(place, M, stage.delay) for place in range(M)) / M,
            sums=_waiting_sums(pipeline),
            micro_batches=M,
        )
        for stage in figures(pipeline)
    ]
    copies, whole = profile.optimizer_copies, machine
    machine = machine.with_own_links(pipeline.num_processes)  # a full pipeline keeps both directions of all links busy
    if machine.memory_bytes is not None:  # stages that share a device share its memory
        machine = replace(machine, memory_bytes=machine.memory_bytes // pipeline.stages_per_process)
    evaluated = partial(evaluate_balance, units, held=held, machine=machine, optimizer_copies=copies)
    if sizes is not None:
        return evaluated(sizes)
    found = partial(best_balance, units, num_stages=pipeline.num_stages, held=held, optimizer_copies=copies)
    found_cuts = [best := found(machine=machine)]
    if pipeline.method.awaits_delays:  # they follow from the cut
        return best
    if machine.bandwidth != whole.bandwidth:  # what avoids a half of a link may have no need to avoid the whole
        found_cuts.append(found(machine=replace(machine, bandwidth=whole.bandwidth)))
    if all(sum(cut.link_seconds) <= AS_GOOD * cut.seconds for cut in found_cuts):
        return best
    found_cuts += [found(machine=machine.with_links_slower(factor)) for factor in SLOWER_LINKS]
    others = dict.fromkeys(tuple(cut.sizes) for cut in found_cuts if cut.sizes != best.sizes)
    balances = [best, *map(evaluated, others)]
    return min(balances, key=lambda balance: _seconds_per_update(units, balance, pipeline, whole))


def _waiting_sums(pipeline: Pipeline) -> int:
    """Return the most gradient sums of tied weights that a stage keeps.

    The tie is assumed to join the first and the last stage. Counted are the sums that are not due yet, one on its way,
    and one that is being applied.
    """
    K = pipeline.num_stages
    can_tie = K > 1 and pipeline.method.why_not_tied is None
    return pipeline.tie_delay(Tie(0, (0, K - 1))) + 2 if can_tie else 0


def with_delays(
    profile: Profile,
    pipeline: Pipeline,
    *,
    machine: Machine = UNIFORM,
    sizes: Sequence[int] | None = None,
) -> Pipeline:
    """Return ``pipeline`` with the least delays that keep full speed.

    Delays are chosen only if the method leaves them open, for the cut ``sizes`` or else the best one. If they are
    staler than the method allows, the fastest delays within its limit are chosen.
    """
    if not pipeline.method.awaits_delays:
        return pipeline
    balance = best_cut(profile, pipeline, machine=machine, sizes=sizes)
    costs = _costs(_units(profile, pipeline, machine), balance, pipeline, machine)
    return Pipeline(with_least_delays(pipeline.method, costs), pipeline.num_stages)


def _units(profile: Profile, pipeline: Pipeline, machine: Machine) -> list[UnitCost]:
    """Return the units' costs for ``pipeline`` with codecs of ``machine``."""
    of_stages = profile.with_stages(pipeline.num_stages)
    units = of_stages.costs(pipeline.micro_batches_per_update)
    return [unit.coded(machine.codecs, machine.coding) for unit in units]


def predict(
    profile: Profile,
    pipeline: Pipeline,
    *,
    machine: Machine = UNIFORM,
    sizes: Sequence[int] | None = None,
) -> Prediction:
    """Predict a run of ``pipeline`` at the micro-batch size of ``profile``.

    The cut is ``sizes``, or the best one if None. Delays that the method leaves open (``delay=auto``)
    are chosen by :func:`with_delays`.

    Raises:
        PartitionError: If no cut is possible, or none fits into memory.
        ConfigError: If the method has heads that are not measured.
    """
    if pipeline.spec.local_losses and pipeline.num_stages > 1:
        raise ConfigError("its local losses have heads that are not measured, and another goal than the model's")
    if pipeline.spec.predicts_gradients and pipeline.num_stages > 1:
        raise ConfigError("its heads are not measured, and how well they predict gradients only a run can tell")
    M = pipeline.micro_batches_per_update
    pipeline = with_delays(profile, pipeline, machine=machine, sizes=sizes)
    balance = best_cut(profile, pipeline, machine=machine, sizes=sizes)
    units = _units(profile, pipeline, machine)
    expected = speed(pipeline.method, _costs(units, balance, pipeline, machine))
    no_links = replace(machine, bandwidth=math.inf, latency=0.0, seconds_per_byte=0.0, seconds_per_message=0.0)
    without = best_cut(profile, pipeline, machine=no_links, sizes=sizes)
    free = _seconds_per_update(units, without, pipeline, no_links)
    per_micro_batch = max(expected.time_per_update, _tied_link_seconds(units, balance, machine)) / M
    last_units = [units[stop - 1] for stop in accumulate(balance.sizes[:-1])]
    crossing = [unit.act_bytes + unit.grad_bytes for unit in last_units]
    if machine.shares_link:  # of each process, over what cuts it sends or receives
        P = pipeline.num_processes
        crossing = [sum(n for k, n in enumerate(crossing) if p in (k % P, (k + 1) % P)) for p in range(P)]
    alone = profile.loading + profile.forward + profile.backward + update_seconds(profile.costs(M))
    return Prediction(
        pipeline=pipeline,
        balance=balance,
        images_per_second=profile.of["micro_batch_size"] / per_micro_batch,
        seconds_per_update=M * per_micro_batch,
        speed_up=alone / per_micro_batch,
        bubble=max(0.0, expected.bubble),
        staleness_mean=[stage.staleness_mean for stage in figures(pipeline)],
        link_share=max(0.0, 1 - free / M / per_micro_batch),
        uneven=unevenness(units, balance),
        codecs=machine.codecs,
        update_bytes=M * max(crossing, default=0.0),
    )


def unevenness(units: Sequence[UnitCost], balance: Balance) -> str | None:
    """Return the cause of an uneven ``balance``, or None if it is even."""
    names, reasons = [unit.name for unit in units], [unit.reason for unit in units]
    work = [seconds - fixed for seconds, fixed in zip(balance.stage_seconds, balance.fixed_seconds, strict=True)]
    return why_uneven(names, reasons, balance.sizes, work)


def _seconds_per_update(units: Sequence[UnitCost], balance: Balance, pipeline: Pipeline, machine: Machine) -> float:
    """Return the seconds per update of a full pipeline."""
    of_schedule = time_per_update(pipeline, _costs(units, balance, pipeline, machine))
    return max(of_schedule, _tied_link_seconds(units, balance, machine))


def _tied_link_seconds(units: Sequence[UnitCost], balance: Balance, machine: Machine) -> float:
    """Return the seconds that tied gradients of one update take on a link.

    All are counted on one link, the slowest.
    """
    stage_of = [k for k, size in enumerate(balance.sizes) for _ in range(size)]
    pairs = [
        (stage_of[other], k, nbytes) for unit, k in zip(units, stage_of, strict=True) for other, nbytes in unit.tied
    ]
    return sum(nbytes for first, k, nbytes in pairs if first != k) / machine.slowest_link[0]


def _costs(units: Sequence[UnitCost], balance: Balance, pipeline: Pipeline, machine: Machine) -> Costs:
    """Return the timing model's costs of stages and links.

    Stages include their part in the messages, and links have their transfer time.
    """
    forward, recompute, backward, backward_weight, update = [], [], [], [], []
    of_copies, of_sums = tied_seconds(units, machine)
    stages = figures(pipeline)
    bounds, speeds = pairwise([0, *accumulate(balance.sizes)]), machine.speeds_of(len(balance.sizes))
    for k, ((start, stop), rate) in enumerate(zip(bounds, speeds, strict=True)):
        inside, before, is_split = units[start:stop], units[:start][-1:], pipeline.splits_backward(k)
        ends = [*before, *(inside[-1:] if stop < len(units) else [])]
        messages = sum(machine.seconds_per_message * unit.num_tensors for unit in ends)
        targets = machine.seconds_per_message if len(ends) == 1 else 0.0  # the first stage sends them, the last takes
        acts = sum(machine.seconds_per_byte * unit.act_bytes + unit.act_coding for unit in ends)
        grads = sum(machine.seconds_per_byte * unit.grad_bytes + unit.grad_coding for unit in ends)
        recompute.append(sum(unit.forward - unit.loading for unit in inside) / rate)
        forward.append(sum(unit.forward for unit in inside) / rate + acts + messages + targets)
        backward.append(sum(unit.backward + is_split * unit.split for unit in inside) / rate + grads + messages)
        backward_weight.append(sum(unit.backward_weight for unit in inside) / rate)
        step = update_seconds(inside, copies=stages[k].copies_per_update) + of_copies[start, stop - 1]
        update.append(step * pipeline.micro_batches_per_update / rate + of_sums[start, stop - 1])
    last_units = [units[stop - 1] for stop in accumulate(balance.sizes[:-1])]
    transfers = [link_times(unit, machine, k) for k, unit in enumerate(last_units)]
    return Costs(
        forward=forward,
        recompute=recompute,
        backward=backward,
        backward_weight=backward_weight,
        update=update,
        link=[machine.latency_after(k) for k in range(len(last_units))],
        transfer=[act for act, _ in transfers],
        transfer_back=[grad for _, grad in transfers],
        shares_link=machine.shares_link,
    )


class Throughput(NamedTuple):
    """The seconds of the whole model for ``samples``, with waits for data."""

    samples: int
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The speed and memory of the same devices without a pipeline."""

    num_devices: int
    single: float  # images per second of one device, BP
    ddp: float  # images per second of all, as replicas with a share of the batch each
    bytes: int  # memory of one device that accumulates micro-batches
    fits: bool  # whether it has so many

    @property
    def best(self) -> float:
        """The images per second of one device or of DDP, the faster of the two."""
        return max(self.single, self.ddp)


def alternative(
    profile: Profile, machine: Machine, *, num_devices: int, whole: Throughput, share: Throughput
) -> Alternative:
    """Predict one device, and data parallelism (DDP) with the same batch.

    ``whole`` has the seconds of one device for the batch, ``share`` those of one of n DDP replicas for its n-th of the
    batch. Gradients are summed by a ring (2 (n-1)/n of the parameters' bytes over each link) while the backward runs,
    and the longer of the two counts.
    """
    update = update_seconds(profile.units)
    update_of_share = update_seconds(profile.with_stages(num_devices).units)
    moved = 2 * (num_devices - 1) / num_devices * sum(unit.parameter_bytes for unit in profile.units)
    bandwidth, latency = machine.slowest_link
    ring = moved / bandwidth + 2 * (num_devices - 1) * latency
    copying = 2 * moved * machine.seconds_per_byte
    seconds = share.forward + max(share.backward, ring) + copying + update_of_share
    units, held = profile.costs(1), [StageFootprint(graphs=1)]
    copies, limit = profile.optimizer_copies, machine.memory_bytes
    (needed,) = evaluate_balance(units, [len(units)], held=held, optimizer_copies=copies).stage_bytes
    return Alternative(
        num_devices=num_devices,
        single=whole.samples / (whole.forward + whole.backward + update),
        ddp=num_devices * share.samples / seconds,
        bytes=needed,
        fits=limit is None or needed <= limit,
    )


def best_of(predictions: Sequence[Prediction]) -> Prediction:
    """Return the fastest prediction, or a less stale one of nearly its speed."""
    fastest = max(p.images_per_second for p in predictions)
    least_stale = min(p.convergence_factor for p in predictions if p.images_per_second >= (1 - WORTH_IT) * fastest)
    fresh = [p for p in predictions if p.convergence_factor <= least_stale]
    fastest = max(p.images_per_second for p in fresh)
    near = [p for p in fresh if p.images_per_second >= (1 - AS_GOOD) * fastest]

    def rank(p: Prediction) -> tuple[float, ...]:
        exactness = CODECS.index(p.codecs.activations)  # the most exact is the first
        return p.pipeline.num_stages, p.pipeline.method.split_backward, exactness, -p.images_per_second

    return min(near, key=rank)


def advise(
    predictions: Sequence[Prediction], other: Alternative, *, unit: str = "samples"
) -> tuple[Prediction | None, str]:
    """Choose the fastest run that is not too stale, or no pipeline.

    All ``predictions`` fit into memory. Of nearly equal ones, the least stale is chosen. Speeds are in ``unit``/s.

    Returns:
        The prediction to follow, or None for no pipeline, and the reason in a sentence or two.
    """
    n = other.num_devices
    usable = [p for p in predictions if p.convergence_factor <= MOST_FACTOR]
    alone = "one device" if other.single >= other.ddp else "DDP"
    if n == 1 or not usable:
        reasons = {
            (True, True): "one device, and the model fits on it: train there, partition.num_stages=1",
            (True, False): "one device, and the model does not fit on it: a pipeline needs a second one; use a smaller "
            "batch, activation checkpointing, or offloading (FSDP)",
            (False, True): f"of what was asked for nothing is possible and fresh enough: use {alone}",
            (False, False): "neither a cut nor the whole model fits: use more devices, a smaller batch, or FSDP, which "
            "also shards parameters",
        }
        return None, reasons[n == 1, other.fits]
    choice = best_of(usable)
    pipeline, speed = choice.pipeline, choice.images_per_second
    if other.fits and (1 + WORTH_IT) * other.best >= speed:
        coded = "" if choice.codecs == PLAIN else f" and runtime.codec={choice.codecs.activations}"
        rival = f"{pipeline.method.name} with K = {pipeline.num_stages}{coded} makes {speed:,.0f}"
        if other.single >= other.ddp:
            slow_links = "the links are too slow for so little work in a micro-batch"
            why = (
                choice.uneven
                or (choice.link_share > MOST_OF_LINKS and slow_links)
                or "a pipeline gains less here than it costs"
            )
            single = f"use one device: it makes {other.single:,.0f} {unit}/s"
            return None, f"{single}, {rival}, and DDP {other.ddp:,.0f}: {why}"
        fresh = f"{rival}, and gradients that are not stale"
        return None, f"use DDP: {n} replicas make {other.ddp:,.0f} {unit}/s, {fresh}"
    faster = f"{speed / other.best:.2f} times as fast as {alone} would be"
    why = faster if other.fits else "the model does not fit on one device"
    stale = f"gradients of stage 0 are {choice.staleness_mean[0]:.3g} updates old on average"
    if choice.codecs != PLAIN:
        why = f"with runtime.codec={choice.codecs.activations}, which rounds what it sends, {why}"
    if any(choice.staleness_mean) and pipeline.num_stages > 2 and not pipeline.method.mitigation:
        stale += ", of which experiment=recommended loses less (docs/choose.md)"
    return choice, f"{why}; {stale if any(choice.staleness_mean) else 'no gradient is stale'}"
