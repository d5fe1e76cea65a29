"""The expected speed, memory and staleness of a method on a cut of a measured model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from adl_dist.errors import ConfigError
from adl_dist.partition.balance import UNIFORM, Balance, best_balance, evaluate_balance
from adl_dist.partition.costs import Machine, Profile, StageFootprint, UnitCost
from adl_dist.schedule import Costs, Pipeline, max_pending_of, speed
from adl_dist.schedule.table import figures


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected speed, memory and staleness of one method on K stages."""

    pipeline: Pipeline
    balance: Balance
    images_per_second: float  # in steady state
    speed_up: float  # over backpropagation of the same micro-batches on one device
    bubble: float  # share of the time in which a stage waits, averaged over stages
    staleness_mean: list[float]  # of each stage, in updates

    @property
    def convergence_factor(self) -> float:
        """(1 + sum of mean staleness / M) / M: what Theorem 1 of the paper bounds the error with; 1/M without any."""
        M = self.pipeline.micro_batches_per_update
        return (1 + sum(self.staleness_mean) / M) / M


def best_cut(
    profile: Profile, pipeline: Pipeline, *, machine: Machine = UNIFORM, sizes: Sequence[int] | None = None
) -> Balance:
    """Return the best cut of the measured model for ``pipeline``, or the one of ``sizes``; see :func:`best_balance`."""
    method, M, kept = pipeline.method, pipeline.micro_batches_per_update, max_pending_of(pipeline)
    units = profile.with_stages(pipeline.num_stages).costs(M)
    held = [
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
    copies = profile.optimizer_copies
    if sizes is not None:
        return evaluate_balance(units, sizes, held=held, machine=machine, optimizer_copies=copies)
    return best_balance(units, num_stages=pipeline.num_stages, held=held, machine=machine, optimizer_copies=copies)


def predict(
    profile: Profile, pipeline: Pipeline, *, machine: Machine = UNIFORM, sizes: Sequence[int] | None = None
) -> Prediction:
    """Predict a run of ``pipeline`` with the micro-batch size of ``profile``; ``sizes`` None: cut where it is best.

    Raises:
        PartitionError: no cut is possible, or none fits into memory.
        ConfigError: local losses, whose heads are not measured.
    """
    if pipeline.spec.local_losses and pipeline.num_stages > 1:
        raise ConfigError("its local losses have heads that are not measured, and another goal than the model's")
    M = pipeline.micro_batches_per_update
    balance = best_cut(profile, pipeline, machine=machine, sizes=sizes)
    units = profile.with_stages(pipeline.num_stages).costs(M)
    expected = speed(pipeline.method, _costs(units, balance, M, machine))
    # The timing model gives a link a latency only; one that is slower than every stage sets the pace.
    of_stages = expected.time_per_update / M
    per_micro_batch = max(of_stages, *balance.link_seconds, 0.0)
    alone = profile.loading + profile.forward + profile.backward + sum(unit.update for unit in profile.costs(M))
    return Prediction(
        pipeline=pipeline,
        balance=balance,
        images_per_second=profile.of["micro_batch_size"] / per_micro_batch,
        speed_up=alone / per_micro_batch,
        bubble=max(0.0, 1 - (1 - expected.bubble) * of_stages / per_micro_batch),
        staleness_mean=[stage.staleness_mean for stage in figures(pipeline)],
    )


def _costs(units: Sequence[UnitCost], balance: Balance, M: int, machine: Machine) -> Costs:
    """Return the timing model's costs: stages with their part in the messages, links with their transfer time."""
    forward, backward, update = [], [], []
    for k, (start, stop) in enumerate(pairwise([0, *accumulate(balance.sizes)])):
        rate = machine.speeds[k] if machine.speeds else 1.0
        inside, before = units[start:stop], units[:start][-1:]
        ends = [*before, *(inside[-1:] if stop < len(units) else [])]
        messages = sum(machine.seconds_per_message * unit.num_tensors for unit in ends)
        acts = sum(machine.seconds_per_byte * unit.act_bytes for unit in ends)
        grads = sum(machine.seconds_per_byte * unit.grad_bytes for unit in ends)
        forward.append(sum(unit.forward for unit in inside) / rate + acts + messages)
        backward.append(sum(unit.backward for unit in inside) / rate + grads + messages)
        update.append(sum(unit.update for unit in inside) * M / rate)
    link = [machine.latency + seconds for seconds in balance.link_seconds]
    return Costs(forward=forward, backward=backward, update=update, link=link)
