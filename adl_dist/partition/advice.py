"""From predictions to one recommendation, also when that is not to use a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from adl_dist.partition.costs import Held, Machine, stage_memory
from adl_dist.partition.predict import Prediction
from adl_dist.partition.profile import Profile

# Of stage 0, in updates: RN-56 at K = 16 diverged from 10 on and trained up to 7.5 (Table 2a of the ADL paper).
MOST_STALENESS = 7.5
AS_GOOD = 0.03  # a lead in speed that does not outweigh staleness


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What the same devices would do without a pipeline.

    Attributes:
        num_devices: n.
        single: images per second of one device, BP.
        ddp: images per second of n replicas with a share of the batch each.
        bytes: of each.
        fits: whether one device holds the whole model.
    """

    num_devices: int
    single: float
    ddp: float
    bytes: int
    fits: bool


def alternative(profile: Profile, machine: Machine, *, num_devices: int, accumulation_steps: int) -> Alternative:
    """Predict plain data parallelism (DDP) on the same devices, with the same global batch.

    Each of n replicas works on a batch of M micro-batches / n at the measured pace; gradients are summed by a ring
    (2 (n-1)/n of the parameters' bytes over each link) while the backward runs, and the longer of the two counts.
    """
    units, M = profile.costs(accumulation_steps), accumulation_steps
    share = M / num_devices
    parameter_bytes = sum(unit.parameter_bytes for unit in units)
    update = sum(unit.update for unit in units) * M
    moved = 2 * (num_devices - 1) / num_devices * parameter_bytes
    ring = moved / machine.bandwidth + 2 * (num_devices - 1) * machine.latency
    own = 2 * moved * machine.seconds_per_byte
    seconds = profile.forward * share + max(profile.backward * share, ring) + own + update
    size = profile.of["micro_batch_size"]
    needed = stage_memory(units, 0, len(units), held=Held(graphs=1), optimizer_copies=profile.optimizer_copies)
    limit = machine.memory_bytes if isinstance(machine.memory_bytes, int) else None
    return Alternative(
        num_devices=num_devices,
        single=size * M / ((profile.forward + profile.backward) * M + update),
        ddp=size * M / seconds,
        bytes=needed,
        fits=limit is None or needed <= limit,
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do.

    Attributes:
        choice: the prediction to follow; None: no pipeline.
        reason: in a sentence or two.
    """

    choice: Prediction | None
    reason: str


def advise(predictions: Sequence[Prediction], other: Alternative) -> Advice:
    """Choose: the fastest that is not too stale, and of nearly equals the least stale.

    Args:
        predictions: of what fits into memory, with at most as many stages as there are devices.
        other: what the devices would do without a pipeline.
    """
    n = other.num_devices
    usable = [p for p in predictions if p.num_stages <= n and max(p.staleness_mean) <= MOST_STALENESS]
    if n == 1 and other.fits:
        return Advice(choice=None, reason="one device, and the model fits on it: train there, partition.num_stages=1")
    if n == 1:
        return Advice(
            choice=None,
            reason="one device, and the model does not fit on it: a pipeline needs a second one; use a smaller batch, "
            "activation checkpointing, or offloading (FSDP)",
        )
    if not usable and other.fits:
        return Advice(choice=None, reason=f"no cut fits, is fresh enough and has {n} devices or less: use DDP")
    if not usable:
        return Advice(
            choice=None,
            reason="neither a cut nor the whole model fits: use more devices, a smaller batch, or FSDP, which also "
            "shards parameters",
        )
    fastest = max(usable, key=lambda p: p.images_per_second)
    near = [p for p in usable if p.images_per_second >= (1 - AS_GOOD) * fastest.images_per_second]
    choice = min(near, key=lambda p: (p.convergence_factor, p.num_stages, -p.images_per_second))
    if other.fits and other.ddp >= (1 - AS_GOOD) * choice.images_per_second:
        return Advice(
            choice=None,
            reason=f"use DDP: {n} replicas make {other.ddp:,.0f} images/s, as fast as {choice.method.name} with "
            f"{choice.images_per_second:,.0f}, and their gradients are not stale",
        )
    if not other.fits:
        why = "the model does not fit on one device"
    else:
        why = f"{choice.images_per_second / other.ddp:.2f} times as fast as DDP would be"
    stale = f"gradients of stage 0 are {choice.staleness_mean[0]:.3g} updates old on average"
    return Advice(choice=choice, reason=f"{why}; {stale if any(choice.staleness_mean) else 'no gradient is stale'}")
