"""The expected speed, memory and staleness of a method on a cut of a measured model."""

from collections.abc import Sequence
from dataclasses import dataclass

from adl_dist.errors import ConfigError
from adl_dist.partition.balance import UNIFORM, Balance, best_balance, evaluate_balance
from adl_dist.partition.costs import Machine, StageFootprint, UnitCost, link_time
from adl_dist.partition.profile import Profile
from adl_dist.schedule import Costs, Pipeline, max_pending_of, speed
from adl_dist.schedule.table import figures


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected speed, memory and staleness of one method on K stages.

    Attributes:
        pipeline: the method and K.
        balance: the cut, with each stage's seconds and bytes.
        images_per_second: speed in steady state.
        speed_up: over backpropagation of the same micro-batches on one device.
        bubble: share of the time in which a stage waits, averaged over stages.
        staleness_mean: staleness of each stage, in updates.
    """

    pipeline: Pipeline
    balance: Balance
    images_per_second: float
    speed_up: float
    bubble: float
    staleness_mean: list[float]

    @property
    def convergence_factor(self) -> float:
        """(1 + sum of mean staleness / M) / M: what Theorem 1 of the paper bounds the error with; 1/M without any."""
        M = self.pipeline.micro_batches_per_update
        return (1 + sum(self.staleness_mean) / M) / M


def held_by(pipeline: Pipeline) -> list[StageFootprint]:
    """Return what the method makes each stage hold."""
    method, M, kept = pipeline.method, pipeline.micro_batches_per_update, max_pending_of(pipeline)
    return [
        StageFootprint(
            graphs=stage.graphs,
            inputs=stage.inputs,
            acts_sent=kept.get(("act", stage.stage), 0),
            grads_sent=kept.get(("grad", stage.stage), 0),
            weight_copies=stage.weight_copies,
            gradient_copies=len(set(stage.staleness_by_offset)) - 1 if method.weights == "stash" else 0,
            recomputes=sum(method.recomputes(place, M, stage.delay) for place in range(M)) / M,
        )
        for stage in figures(pipeline)
    ]


def best_cut(profile: Profile, pipeline: Pipeline, *, machine: Machine = UNIFORM) -> Balance:
    """Return the best cut of the measured model for ``pipeline``.

    Raises:
        PartitionError: no cut is possible, or none fits into memory.
    """
    return best_balance(
        profile.with_stages(pipeline.num_stages).costs(pipeline.micro_batches_per_update),
        num_stages=pipeline.num_stages,
        held=held_by(pipeline),
        machine=machine,
        optimizer_copies=profile.optimizer_copies,
    )


def predict(
    profile: Profile,
    pipeline: Pipeline,
    *,
    machine: Machine = UNIFORM,
    sizes: Sequence[int] | None = None,
) -> Prediction:
    """Predict a run of ``pipeline``.

    Args:
        profile: measured with the run's micro-batch size.
        pipeline: the method and K.
        machine: the devices and links it would run on.
        sizes: units of each stage; None: those of the best cut.

    Raises:
        PartitionError: no cut is possible, or none fits into memory.
        ConfigError: local losses, whose heads are not measured.
    """
    if pipeline.spec.local_losses and pipeline.num_stages > 1:
        raise ConfigError("its local losses have heads that are not measured, and another goal than the model's")
    M = pipeline.micro_batches_per_update
    units = profile.with_stages(pipeline.num_stages).costs(M)
    held = held_by(pipeline)
    if sizes is None:
        balance = best_cut(profile, pipeline, machine=machine)
    else:
        balance = evaluate_balance(units, sizes, held=held, machine=machine, optimizer_copies=profile.optimizer_copies)
    costs = _costs(units, balance, M, machine)
    expected = speed(pipeline.method, costs)
    size = profile.of["micro_batch_size"]
    # The timing model gives a link a latency only; one that is slower than every stage sets the pace.
    of_stages = expected.time_per_update / M
    per_micro_batch = max(of_stages, *balance.link_seconds, 0.0)
    alone = profile.loading + profile.forward + profile.backward + sum(unit.update for unit in profile.costs(M))
    return Prediction(
        pipeline=pipeline,
        balance=balance,
        images_per_second=size / per_micro_batch,
        speed_up=alone / per_micro_batch,
        bubble=max(0.0, 1 - (1 - expected.bubble) * of_stages / per_micro_batch),
        staleness_mean=[stage.staleness_mean for stage in figures(pipeline)],
    )


def _costs(units: Sequence[UnitCost], balance: Balance, M: int, machine: Machine) -> Costs:
    """Return the timing model's costs: stages with their part in the messages, links with their transfer time."""
    forward, backward, update, link = [], [], [], []
    start = 0
    for k, size in enumerate(balance.sizes):
        stop = start + size
        rate = machine.speeds[k] if machine.speeds else 1.0
        stage_units = units[start:stop]
        before, after = units[start - 1] if start else None, units[stop - 1] if stop < len(units) else None
        messages = sum(machine.seconds_per_message * unit.num_tensors for unit in (before, after) if unit is not None)
        acts = sum(machine.seconds_per_byte * unit.act_bytes for unit in (before, after) if unit is not None)
        grads = sum(machine.seconds_per_byte * unit.grad_bytes for unit in (before, after) if unit is not None)
        forward.append(sum(unit.forward for unit in stage_units) / rate + acts + messages)
        backward.append(sum(unit.backward for unit in stage_units) / rate + grads + messages)
        update.append(sum(unit.update for unit in stage_units) * M / rate)
        if after is not None:
            link.append(machine.latency + link_time(after, machine))
        start = stop
    return Costs(forward=forward, backward=backward, update=update, link=link)
