"""From predictions to one recommendation, also when that is not to use a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from adl_dist.partition.costs import Machine, StageFootprint, stage_memory
from adl_dist.partition.predict import Prediction
from adl_dist.partition.profile import Profile

# Of the convergence factor: RN-56 at K = 16 trained with M = 4 (factor 4) and diverged with M = 3 (9.2), Table 2a.
MOST_FACTOR = 4.0
AS_GOOD = 0.03  # a lead in speed that does not outweigh staleness


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Measured on the whole model at once.

    Attributes:
        samples: samples of the measured batch.
        forward: seconds, with what loading keeps the device waiting.
        backward: seconds.
    """

    samples: int
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The speed and memory of the same devices without a pipeline.

    Attributes:
        num_devices: n.
        single: images per second of one device, BP.
        ddp: images per second of n replicas with a share of the batch each.
        bytes: memory of one device that accumulates micro-batches.
        fits: whether it has so many.
    """

    num_devices: int
    single: float
    ddp: float
    bytes: int
    fits: bool

    @property
    def best(self) -> float:
        """Images per second of the faster of the two."""
        return max(self.single, self.ddp)


def alternative(
    profile: Profile, machine: Machine, *, num_devices: int, whole: Throughput, share: Throughput
) -> Alternative:
    """Predict one device alone, and plain data parallelism (DDP) with the same global batch.

    Of DDP, each of n replicas works on its share of the batch; gradients are summed by a ring (2 (n-1)/n of the
    parameters' bytes over each link) while the backward runs, and the longer of the two counts.

    Args:
        profile: the model's costs.
        machine: devices and links.
        num_devices: n.
        whole: the batch on one device.
        share: the batch divided by n, on each of n devices.
    """
    parameter_bytes = sum(unit.parameter_bytes for unit in profile.units)
    update = sum(unit.update for unit in profile.units)
    update_of_share = sum(unit.update for unit in profile.with_stages(num_devices).units)
    moved = 2 * (num_devices - 1) / num_devices * parameter_bytes
    ring = moved / machine.bandwidth + 2 * (num_devices - 1) * machine.latency
    copying = 2 * moved * machine.seconds_per_byte
    seconds = share.forward + max(share.backward, ring) + copying + update_of_share
    units = profile.costs(1)
    needed = stage_memory(
        units, 0, len(units), held=StageFootprint(graphs=1), optimizer_copies=profile.optimizer_copies
    )
    limit = machine.memory_bytes if isinstance(machine.memory_bytes, int) else None
    return Alternative(
        num_devices=num_devices,
        single=whole.samples / (whole.forward + whole.backward + update),
        ddp=num_devices * share.samples / seconds,
        bytes=needed,
        fits=limit is None or needed <= limit,
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation.

    Attributes:
        choice: the prediction to follow; None: no pipeline.
        reason: why, in a sentence or two.
    """

    choice: Prediction | None
    reason: str


def advise(predictions: Sequence[Prediction], other: Alternative) -> Advice:
    """Choose: the fastest that is not too stale, and of nearly equals the least stale.

    Args:
        predictions: the runs that fit into memory, with at most as many stages as there are devices.
        other: the same devices without a pipeline.
    """
    n = other.num_devices
    usable = [p for p in predictions if p.pipeline.num_stages <= n and p.convergence_factor <= MOST_FACTOR]
    if n == 1 and other.fits:
        return Advice(choice=None, reason="one device, and the model fits on it: train there, partition.num_stages=1")
    if n == 1:
        return Advice(
            choice=None,
            reason="one device, and the model does not fit on it: a pipeline needs a second one; use a smaller batch, "
            "activation checkpointing, or offloading (FSDP)",
        )
    alone = "one device" if other.single >= other.ddp else "DDP"
    if not usable and other.fits:
        return Advice(choice=None, reason=f"of what was asked for nothing is possible and fresh enough: use {alone}")
    if not usable:
        return Advice(
            choice=None,
            reason="neither a cut nor the whole model fits: use more devices, a smaller batch, or FSDP, which also "
            "shards parameters",
        )
    fastest = max(usable, key=lambda p: p.images_per_second)
    near = [p for p in usable if p.images_per_second >= (1 - AS_GOOD) * fastest.images_per_second]
    choice = min(near, key=lambda p: (p.convergence_factor, p.pipeline.num_stages, -p.images_per_second))
    if other.fits and other.best >= (1 - AS_GOOD) * choice.images_per_second:
        rival = (
            f"{choice.pipeline.method.name} with K = {choice.pipeline.num_stages} makes {choice.images_per_second:,.0f}"
        )
        if other.single >= other.ddp:
            return Advice(
                choice=None,
                reason=f"use one device: it makes {other.single:,.0f} images/s, {rival}, and DDP {other.ddp:,.0f}: "
                "the links are too slow",
            )
        return Advice(
            choice=None,
            reason=f"use DDP: {n} replicas make {other.ddp:,.0f} images/s, {rival}, and gradients that are not stale",
        )
    if not other.fits:
        why = "the model does not fit on one device"
    else:
        why = f"{choice.images_per_second / other.best:.2f} times as fast as {alone} would be"
    stale = f"gradients of stage 0 are {choice.staleness_mean[0]:.3g} updates old on average"
    return Advice(choice=choice, reason=f"{why}; {stale if any(choice.staleness_mean) else 'no gradient is stale'}")
