"""One segment of training as the stages carry it out: the actions, and how much each works on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.greedy import greedy_streams
from adl_dist.schedule.methods import Method
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.streams import evaluation_stream, training_stream


@dataclass(frozen=True)
class Work:
    """What one stage does in one segment.

    Attributes:
        stream: its actions.
        sizes: samples of each of its micro-batches.
        sizes_upstream: samples of each micro-batch of the stage before it, which is what arrives.
        loss_weights: of the loss of each of its micro-batches.
    """

    stream: list[Action]
    sizes: list[int]
    sizes_upstream: list[int]
    loss_weights: list[float]

    @cached_property
    def last_of_groups(self) -> frozenset[int]:
        """The micro-batches whose backward completes the gradients of a group."""
        last, found = -1, set()
        for action in self.stream:
            if action.op is Op.BACKWARD:
                last = action.number
            elif action.op is Op.UPDATE:
                found.add(last)
        return frozenset(found)


def training_work(
    method: Method, segment: Segment, *, num_stages: int, stages: Iterable[int], seed: int
) -> dict[int, Work]:
    """What each of ``stages`` does to train on ``segment``; every process derives the same."""
    sizes, groups = segment.sizes, segment.group_sizes
    if not method.is_asynchronous_greedy:
        weights = segment.loss_weights(method.reduction, sizes)
        return {
            k: Work(list(training_stream(method, k, num_stages=num_stages, group_sizes=groups)), sizes, sizes, weights)
            for k in stages
        }
    streams, origins = greedy_streams(method, num_stages=num_stages, group_sizes=groups, seed=seed)
    of_stage = [[sizes[b] for b in origin] for origin in origins]
    return {
        k: Work(streams[k], of_stage[k], of_stage[max(k - 1, 0)], segment.loss_weights(method.reduction, of_stage[k]))
        for k in stages
    }


def evaluation_work(segment: Segment, *, num_stages: int, stages: Iterable[int]) -> dict[int, Work]:
    """What each of ``stages`` does to evaluate on ``segment``."""
    sizes = segment.sizes
    return {
        k: Work(list(evaluation_stream(k, num_stages=num_stages, num_micro_batches=len(sizes))), sizes, sizes, [])
        for k in stages
    }
