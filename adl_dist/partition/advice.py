"""From predictions to one recommendation, also when that is not to use a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adl_dist.partition.balance import evaluate_balance
from adl_dist.partition.costs import Machine, Profile, StageFootprint
from adl_dist.partition.predict import Prediction

# Of the convergence factor: RN-56 at K = 16 trained with M = 4 (factor 4) and diverged with M = 3 (9.2), Table 2a.
MOST_FACTOR = 4.0
AS_GOOD = 0.03  # a lead in speed that does not outweigh staleness


class Throughput(NamedTuple):
    """Seconds measured on the whole model at once; ``forward`` includes what loading keeps the device waiting."""

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
        """Images per second of the faster of the two."""
        return max(self.single, self.ddp)


def alternative(
    profile: Profile, machine: Machine, *, num_devices: int, whole: Throughput, share: Throughput
) -> Alternative:
    """Predict one device alone, and plain data parallelism (DDP) with the same global batch.

    Of DDP, each of n replicas works on its ``share`` of the ``whole`` batch; gradients are summed by a ring (2 (n-1)/n
    of the parameters' bytes over each link) while the backward runs, and the longer of the two counts.
    """
    update = sum(unit.update for unit in profile.units)
    update_of_share = sum(unit.update for unit in profile.with_stages(num_devices).units)
    moved = 2 * (num_devices - 1) / num_devices * sum(unit.parameter_bytes for unit in profile.units)
    ring = moved / machine.bandwidth + 2 * (num_devices - 1) * machine.latency
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


class Advice(NamedTuple):
    """A recommendation: the prediction to follow (None: no pipeline), and why in a sentence or two."""

    choice: Prediction | None
    reason: str


def advise(predictions: Sequence[Prediction], other: Alternative) -> Advice:
    """Choose, of runs that fit into memory, the fastest that is not too stale, and of nearly equals the least stale."""
    n = other.num_devices
    if n == 1 and other.fits:
        return Advice(None, "one device, and the model fits on it: train there, partition.num_stages=1")
    if n == 1:
        return Advice(
            None,
            "one device, and the model does not fit on it: a pipeline needs a second one; use a smaller batch, "
            "activation checkpointing, or offloading (FSDP)",
        )
    usable = [p for p in predictions if p.pipeline.num_stages <= n and p.convergence_factor <= MOST_FACTOR]
    alone = "one device" if other.single >= other.ddp else "DDP"
    if not usable and other.fits:
        return Advice(None, f"of what was asked for nothing is possible and fresh enough: use {alone}")
    if not usable:
        return Advice(
            None,
            "neither a cut nor the whole model fits: use more devices, a smaller batch, or FSDP, which also shards "
            "parameters",
        )
    fastest = max(usable, key=lambda p: p.images_per_second)
    near = [p for p in usable if p.images_per_second >= (1 - AS_GOOD) * fastest.images_per_second]
    choice = min(near, key=lambda p: (p.convergence_factor, p.pipeline.num_stages, -p.images_per_second))
    pipeline, speed = choice.pipeline, choice.images_per_second
    if other.fits and other.best >= (1 - AS_GOOD) * speed:
        rival = f"{pipeline.method.name} with K = {pipeline.num_stages} makes {speed:,.0f}"
        if other.single >= other.ddp:
            slow_links = f"{rival}, and DDP {other.ddp:,.0f}: the links are too slow"
            return Advice(None, f"use one device: it makes {other.single:,.0f} images/s, {slow_links}")
        fresh = f"{rival}, and gradients that are not stale"
        return Advice(None, f"use DDP: {n} replicas make {other.ddp:,.0f} images/s, {fresh}")
    faster = f"{speed / other.best:.2f} times as fast as {alone} would be"
    why = faster if other.fits else "the model does not fit on one device"
    stale = f"gradients of stage 0 are {choice.staleness_mean[0]:.3g} updates old on average"
    return Advice(choice, f"{why}; {stale if any(choice.staleness_mean) else 'no gradient is stale'}")
