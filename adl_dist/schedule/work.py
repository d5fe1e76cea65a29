"""One segment as the stages carry it out: the actions, and how much each works on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from adl_dist.schedule.actions import BACKWARDS, LINKS, Action, Op
from adl_dist.schedule.build_actions import evaluation_actions, evaluation_turns, training_actions, training_turns
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.replay import Sending, max_outstanding
from adl_dist.schedule.run_plan import Segment
from adl_dist.schedule.split import simulated


@dataclass(frozen=True)
class StageWork:
    """The share of one stage in one segment."""

    actions: list[Action]
    sizes: list[int]  # samples of each of its micro-batches
    loss_weights: list[float]  # the factor on the loss of each of its micro-batches

    def last_of_groups(self) -> frozenset[int]:
        """Return the micro-batches whose backward completes the gradients of a group."""
        last, completing = -1, set()
        for action in self.actions:
            if action.op in BACKWARDS:
                last = action.number
            elif action.op is Op.UPDATE:
                completing.add(last)
        return frozenset(completing)


def training_work(pipeline: Pipeline, segment: Segment, *, stages: Iterable[int]) -> dict[int, StageWork]:
    """Return the work of each of ``stages`` to train on ``segment``; every process derives the same."""
    pipeline = pipeline.in_epoch(segment.epoch)
    sizes, groups = segment.sizes, tuple(segment.group_sizes)
    weights = segment.loss_weights(pipeline.method.reduction, sizes)
    work = {k: StageWork(list(_actions(pipeline, k, groups)), sizes, weights) for k in stages}
    simulated.cache_clear()  # made for all stages, which may be many more than these
    return work


def turns_of(pipeline: Pipeline, segment: Segment, process: int, *, training: bool) -> Sequence[int]:
    """Return, for each action of ``process``, which of its stages carries it out, to train on ``segment`` or not."""
    if not training:
        return list(evaluation_turns(pipeline, process, num_micro_batches=len(segment.sizes)))
    return _turns(pipeline.in_epoch(segment.epoch), process, tuple(segment.group_sizes))


@lru_cache(maxsize=32)
def _turns(pipeline: Pipeline, process: int, group_sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(training_turns(pipeline, process, group_sizes=group_sizes))


@lru_cache(maxsize=32)
def _actions(pipeline: Pipeline, stage: int, group_sizes: tuple[int, ...]) -> tuple[Action, ...]:
    # Kept: the epochs of a run are alike, and so many new objects would make Python's garbage collector look at all.
    return tuple(training_actions(pipeline, stage, group_sizes=group_sizes))


def forget_actions() -> None:
    """Free the lists kept for further epochs: 0.7 MB for every stage and 1,000 micro-batches."""
    _actions.cache_clear()
    _turns.cache_clear()


@lru_cache(maxsize=32)
def max_pending_of(pipeline: Pipeline) -> Mapping[Sending, int]:
    """Return how many messages may be under way on each edge, by (what, sending stage), before a send waits.

    So few that a buffer is given back as soon as its sender can know that it has left, and enough that in steady state
    no send waits for what has yet to happen; while the pipeline fills or empties one may, and in epochs that flush. No
    such wait closes a cycle of stages that wait for each other (tests/schedule/test_schedule.py).
    """
    K, M = pipeline.num_stages, pipeline.micro_batches_per_update
    if pipeline.spec.local_losses:  # nothing comes back that would tell
        return {(link.what, k): pipeline.max_pending for link in LINKS.values() for k in range(K)}
    fill = pipeline.updates_to_fill
    groups = [M] * (fill + 1 + fill)
    made = [list(training_actions(pipeline, k, group_sizes=groups)) for k in range(K)]
    steady = range(fill * M, (fill + 1) * M)
    return max_outstanding(made, steady)


def updates_that_load(group_sizes: Sequence[int], num_micro_batches: int) -> int:
    """Return the fewest updates that take in at least so many micro-batches, or all there are."""
    return sum(end < num_micro_batches for end in accumulate(group_sizes[:-1])) + 1


def shorten(actions: list[Action], pipeline: Pipeline, stage: int, *, group_sizes: Sequence[int]) -> None:
    """Turn a list of actions, in place, into that of a segment of fewer groups, while a stage carries it out.

    Up to the first action that the longer list has for a micro-batch beyond these groups (2BW chooses weights right
    before it) both are the same, so a stage that has not come that far does not notice. What follows is the drain.

    ``actions`` are those of the whole segment, from :func:`training_actions`, ``group_sizes`` the first of its groups.
    """
    shorter = list(training_actions(pipeline, stage, group_sizes=group_sizes))
    same = next((i for i, (a, b) in enumerate(zip(actions, shorter, strict=False)) if a != b), len(shorter))
    actions[same:] = shorter[same:]


def evaluation_work(segment: Segment, *, num_stages: int, stages: Iterable[int]) -> dict[int, StageWork]:
    """Return the work of each of ``stages`` to evaluate on ``segment``."""
    sizes, num = segment.sizes, len(segment.sizes)
    lists = {k: list(evaluation_actions(k, num_stages=num_stages, num_micro_batches=num)) for k in stages}
    return {k: StageWork(actions, sizes, []) for k, actions in lists.items()}
