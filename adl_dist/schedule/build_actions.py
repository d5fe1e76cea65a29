"""The list of actions of a stage, built in the same way for all methods."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.parts import (
    backward_part,
    ends_of,
    forward,
    forward_part,
    gradient_part,
    places_of,
    tied_updates_left,
    update_part,
)
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.split import split_actions

Time = tuple[int, int]  # the tick; 0 for its forward, 1 for the rest


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

    A method that flushes drains after each group. If a method's row splits the backward, WG follows the forward in
    every stage by as many ticks as I does in stage 0. With ``method.split_backward`` the order between two updates
    comes from :mod:`adl_dist.schedule.split`. Stages that share tied weights, or clip by the norm of the model,
    exchange gradients or their norms around the updates: :func:`~adl_dist.schedule.parts.gradient_part`.

    Args:
        pipeline: the method on K stages.
        stage: k in [0, K), 0 nearest the data; the paper's module index is k + 1.
        group_sizes: micro-batches of each group, in order; the same for every stage (Algorithm 1, by batch).
    """
    if pipeline.method.split_backward:
        yield from split_actions(pipeline, stage, tuple(group_sizes))
        return
    for first, drained in _drains(pipeline, group_sizes):
        for _, actions in _until_drained(pipeline, stage, first, drained):
            yield from actions


def training_turns(pipeline: Pipeline, process: int, *, group_sizes: Sequence[int]) -> Iterator[int]:
    """Yield the stage of each action of ``process`` in training.

    Like a stage, a process has in each tick at most one forward, then one backward.
    """
    stages = pipeline.stages_of(process)
    for first, drained in _drains(pipeline, group_sizes):
        yield from _merged(
            [(when, k, len(actions)) for when, actions in _until_drained(pipeline, k, first, drained)] for k in stages
        )


def evaluation_turns(pipeline: Pipeline, process: int, *, num_micro_batches: int) -> Iterator[int]:
    """Yield the stage of each action of ``process`` in evaluation."""
    stages, K = pipeline.stages_of(process), pipeline.num_stages
    lengths = {k: len(list(forward(Op.PREDICT, 0, k, K))) for k in stages}
    yield from _merged(
        [((pipeline.forward_tick(k, b), 0), k, lengths[k]) for b in range(num_micro_batches)] for k in stages
    )


def _merged(parts: Iterable[Iterable[tuple[Time, int, int]]]) -> Iterator[int]:
    """Merge (time, stage, number of actions) by time; yield the stages."""
    for _, k, number in heapq.merge(*parts):
        yield from itertools.repeat(k, number)


def _drains(pipeline: Pipeline, group_sizes: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (first micro-batch, [(group, size), ...]) for each drain."""
    groups, first = list(enumerate(group_sizes)), 0
    for drained in [[group] for group in groups] if pipeline.flush else [groups]:
        yield first, drained
        first += sum(size for _, size in drained)


def _until_drained(
    pipeline: Pipeline, stage: int, first: int, groups: Sequence[tuple[int, int]]
) -> Iterator[tuple[Time, list[Action]]]:
    """Yield (time, actions) of one drain; see :func:`_drains`."""
    delay, splits, head_delay = pipeline.delays[stage], pipeline.spec.splits, pipeline.head_delay(stage)
    op, until = (Op.BACKWARD_INPUT, pipeline.delays[0]) if splits else (Op.BACKWARD, delay)
    where = dict(enumerate(places_of(groups), start=first))
    order = sorted(where, reverse=pipeline.spec.last_in_first_out)
    last_of_groups = {where[b].group: b for b in order}
    ends, flush = ends_of(groups, first), pipeline.flush
    # The parts in their order: forward, backward to upstream, the rest of the backward, learning of a head.
    ticks = [pipeline.forward_tick(stage, place) for place in range(len(order))]
    laters = [0, delay, until] if head_delay is None else [0, delay, until, head_delay]
    parts = [[(tick + later, part, place) for place, tick in enumerate(ticks)] for part, later in enumerate(laters)]
    for tick, part, place in sorted(itertools.chain(*parts)):
        b, arrived = order[place], first + place
        if part == 0:
            yield (tick, 0), list(forward_part(pipeline, stage, arrived, where[arrived]))
        elif part == 1:
            yield (tick, 1), list(backward_part(op, pipeline, stage, b, where[b]))
        elif part == 2:
            weights, group = [Action(Op.BACKWARD_WEIGHT, b)] * splits, where[b].group
            if last_of_groups[group] == b:
                weights += gradient_part(pipeline, stage, group, ends)
                if not pipeline.shares_norms:
                    weights += update_part(pipeline, stage, group, ends, tied_apart=flush)
            yield (tick, 1), weights
        else:
            place_in_group = where[arrived]
            ends_group = place_in_group.offset + 1 == place_in_group.size
            learning = [Action(Op.RECV_GRAD, arrived), Action(Op.LEARN, arrived)]
            yield (tick, 1), learning + [Action(Op.UPDATE_HEAD, place_in_group.group)] * ends_group
    left = list(tied_updates_left(pipeline, stage, ends, tied_apart=flush))
    holders = {holder for tie in pipeline.ties_of(stage) for holder in tie.stages}
    if pipeline.shares_norms:
        left[:0] = [a for group in ends for a in update_part(pipeline, stage, group, ends, tied_apart=True)]
        holders = {*range(pipeline.num_stages)}
    if left:
        # After the last backwards of all holders, because another stage of this process may have to do its own first.
        delays = {k: pipeline.delays[0 if splits else k] for k in holders}
        yield (max(pipeline.forward_tick(k, len(order) - 1) + later for k, later in delays.items()), 1), left


def evaluation_actions(stage: int, *, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield the actions of ``stage`` in evaluation: forwards only."""
    for micro_batch in range(num_micro_batches):
        yield from forward(Op.PREDICT, micro_batch, stage, num_stages)
