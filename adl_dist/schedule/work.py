"""The work of the stages on one segment: actions, sizes and loss weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.build_actions import evaluation_actions, evaluation_turns, training_actions, training_turns
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.run_plan import Segment
from adl_dist.schedule.split import simulated


@dataclass(frozen=True)
class StageWork:
    """The work of one stage on one segment."""

    actions: list[Action]
    sizes: list[int]  # samples of each of its micro-batches
    loss_weights: list[float]  # the factor on the loss of each of its micro-batches

    def last_of_groups(self) -> frozenset[int]:
        """Return the micro-batches that complete a group's gradients."""
        last, completing = -1, set()
        for action in self.actions:
            if action.op in BACKWARDS:
                last = action.number
            elif action.op is Op.UPDATE:
                completing.add(last)
        return frozenset(completing)


def training_work(pipeline: Pipeline, segment: Segment, *, stages: Iterable[int]) -> dict[int, StageWork]:
    """Return the work of ``stages`` to train on ``segment``."""
    pipeline = pipeline.in_epoch(segment.epoch)
    sizes, groups = segment.sizes, tuple(segment.group_sizes)
    weights = segment.loss_weights(pipeline.method.reduction, sizes)
    work = {k: StageWork(list(_actions(pipeline, k, groups)), sizes, weights) for k in stages}
    simulated.cache_clear()  # it holds all stages, which may be many more than these
    return work


def turns_of(pipeline: Pipeline, segment: Segment, process: int, *, training: bool) -> Sequence[int]:
    """Return the stage of each action of ``process`` on ``segment``."""
    if not training:
        return list(evaluation_turns(pipeline, process, num_micro_batches=len(segment.sizes)))
    return _turns(pipeline.in_epoch(segment.epoch), process, tuple(segment.group_sizes))


@lru_cache(maxsize=32)
def _turns(pipeline: Pipeline, process: int, group_sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(training_turns(pipeline, process, group_sizes=group_sizes))


@lru_cache(maxsize=32)
def _actions(pipeline: Pipeline, stage: int, group_sizes: tuple[int, ...]) -> tuple[Action, ...]:
    # Cached: epochs of a run are alike, and so many new objects would start Python's garbage collector.
    return tuple(training_actions(pipeline, stage, group_sizes=group_sizes))


def updates_that_load(group_sizes: Sequence[int], num_micro_batches: int) -> int:
    """Return the fewest updates that hold ``num_micro_batches``, or all."""
    return sum(end < num_micro_batches for end in accumulate(group_sizes[:-1])) + 1


def shorten(actions: list[Action], pipeline: Pipeline, stage: int, *, group_sizes: Sequence[int]) -> None:
    """Shorten a list of actions in place, while a stage executes it.

    The segment then has fewer groups. Both lists are equal up to the first action for a micro-batch beyond these groups
    (2BW chooses weights right before it), so a stage that has not reached this action simply drains earlier.

    Args:
        actions: those of the whole segment, from :func:`training_actions`.
        pipeline: the method on K stages.
        stage: k.
        group_sizes: the first groups of the segment, which remain.
    """
    shorter = list(training_actions(pipeline, stage, group_sizes=group_sizes))
    same = next((i for i, (a, b) in enumerate(zip(actions, shorter, strict=False)) if a != b), len(shorter))
    actions[same:] = shorter[same:]


def evaluation_work(segment: Segment, *, num_stages: int, stages: Iterable[int]) -> dict[int, StageWork]:
    """Return the work of ``stages`` to evaluate ``segment``."""
    sizes, num = segment.sizes, len(segment.sizes)
    lists = {k: list(evaluation_actions(k, num_stages=num_stages, num_micro_batches=num)) for k in stages}
    return {k: StageWork(actions, sizes, []) for k, actions in lists.items()}
