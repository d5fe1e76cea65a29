"""What is fastest within a bound on staleness: accumulation steps, delays, a backward in one or two parts, and a cut.

With less delay a smaller M bears the same staleness, and of one batch the micro-batches are larger, which kernels are
faster on. So each number of steps is looked at with what was measured for its own micro-batches, its own delays, which
are the fastest that its staleness allows, and the best cut for these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition.balance import UNIFORM
from adl_dist.partition.costs import Machine, Profile
from adl_dist.partition.predict import Prediction, predict
from adl_dist.schedule import Method, Pipeline

NO_DIFFERENCE = 1e-9


def steps_to_try(batch_size: int, bound: float, num_stages: int) -> list[int]:
    """Return numbers of micro-batches that divide a batch evenly, up to the first that bears the delays of ADL."""
    steps = []
    for M in range(1, batch_size + 1):
        if batch_size % M == 0:
            steps.append(M)
            if bound * M >= 2 * (num_stages - 1) - NO_DIFFERENCE:
                break
    return steps


def within_bound(
    method: Method,
    num_stages: int,
    *,
    bound: float,
    profiles: Mapping[int, Profile],
    machine: Machine = UNIFORM,
    sizes: Sequence[int] | None = None,
    may_split: bool = True,
) -> tuple[list[Prediction], list[str]]:
    """Return the fastest run of each M, with a whole and with a split backward, whose staleness is within ``bound``.

    ``bound`` is on the mean staleness of each stage, in updates; ``profiles`` are the measurements for each M. Of
    ``method`` accumulation steps and delays are replaced, and its backward is split, too, if it ``may_split``.
    ``sizes`` None: cut where it is best.

    Returns:
        The predictions, and why others are not possible.
    """
    predictions, refused = [], []
    for M, profile in sorted(profiles.items()):
        for split in dict.fromkeys((method.split_backward, may_split)):
            chosen = replace(method, accumulation_steps=M, delay="auto", max_staleness=bound, split_backward=split)
            try:
                predictions.append(predict(profile, Pipeline(chosen, num_stages), machine=machine, sizes=sizes))
            except (PartitionError, ConfigError) as error:
                parts = "two parts" if split else "one part"
                refused.append(f"{method.name}, K = {num_stages}, M = {M}, backward in {parts}: {error}")
    return predictions, refused


def only_within(predictions: Sequence[Prediction], bound: float) -> list[Prediction]:
    """Return those whose gradients are on no stage older than ``bound`` updates on average."""
    return [p for p in predictions if max(p.staleness_mean) <= bound + NO_DIFFERENCE]
