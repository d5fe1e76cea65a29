"""Builds the list of actions of a stage, the same way for every method."""

from collections.abc import Iterator, Sequence

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.parts import backward_part, forward, forward_part, learning_part, places_of
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.split import split_actions


def training_actions(pipeline: Pipeline, stage: int, *, group_sizes: Sequence[int]) -> Iterator[Action]:
    """Yield the actions of ``stage`` that train on one segment.

    One tick is at most one forward, then one backward, then an update if a group is complete. Warm-up,
    steady state and drain need no code of their own; they follow from ``tick - delay``. ADL, K = 3, stage 0
    (delay 4), six micro-batches in groups of two:

        tick      0   1   2   3   4    5     6    7     8    9
        forward   F0  F1  F2  F3  F4   F5
        backward                  B0   B1    B2   B3    B4   B5
        update                         U0         U1         U2
                  |-- warm-up --| | steady | |----- drain -----|

    A method that flushes does so after each group: each of its groups is a drain of its own. Where the backward is
    split, the order between two updates is another one: see :mod:`adl_dist.schedule.split`.

    ``stage`` is k in [0, K), 0 nearest the data; the paper's module index is k + 1. ``group_sizes``: micro-batches of
    each group, in order; the same list for every stage, so all accumulate the same ones (Algorithm 1, by batch).

    Raises:
        ValueError: stage or a group size is out of range.
    """
    if not 0 <= stage < pipeline.num_stages:
        raise ValueError(f"stage must be in [0, num_stages={pipeline.num_stages}), got {stage}")
    if any(size < 1 for size in group_sizes):
        raise ValueError(f"groups must be >= 1, got {list(group_sizes)}")
    if pipeline.method.split_backward:
        yield from split_actions(pipeline, tuple(group_sizes))[stage]
        return
    groups = list(enumerate(group_sizes))
    first = 0
    for drained in [[group] for group in groups] if pipeline.flush else [groups]:
        yield from _until_drained(pipeline, stage, first, drained)
        first += sum(size for _, size in drained)


def _until_drained(pipeline: Pipeline, stage: int, first: int, groups: Sequence[tuple[int, int]]) -> Iterator[Action]:
    """Yield from an empty pipeline to an empty one; ``groups`` are (number, size), from micro-batch ``first`` on."""
    delay, head_delay = pipeline.delays[stage], pipeline.head_delay(stage)
    where = dict(enumerate(places_of(groups), start=first))
    order = sorted(where, reverse=pipeline.spec.last_in_first_out)
    num = len(order)

    for tick in range(num + max(delay, head_delay or 0)):
        if tick < num:
            yield from forward_part(pipeline, stage, first + tick, where[first + tick])
        if 0 <= tick - delay < num:
            b = order[tick - delay]
            yield from backward_part(Op.BACKWARD, pipeline, stage, b, where[b])
            if tick - delay + 1 == num or where[order[tick - delay + 1]].group != where[b].group:
                yield Action(Op.UPDATE, where[b].group)
        if head_delay is not None and tick - head_delay >= 0:
            b = first + tick - head_delay
            yield from learning_part(b)
            if where[b].offset + 1 == where[b].size:
                yield Action(Op.UPDATE_HEAD, where[b].group)


def evaluation_actions(stage: int, *, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield the actions of ``stage`` that evaluate: forwards only, with nothing kept; every method does the same."""
    for micro_batch in range(num_micro_batches):
        yield from forward(Op.PREDICT, micro_batch, stage, num_stages)
