"""Builds the list of actions of a stage, the same way for every method."""

from collections.abc import Iterator, Sequence

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.pipeline import Pipeline


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

    A method that flushes does so after each group: each of its groups is a drain of its own.

    ``stage`` is k in [0, K), 0 nearest the data; the paper's module index is k + 1. ``group_sizes``: micro-batches of
    each group, in order; the same list for every stage, so all accumulate the same ones (Algorithm 1, by batch).

    Raises:
        ValueError: stage or a group size is out of range.
    """
    if not 0 <= stage < pipeline.num_stages:
        raise ValueError(f"stage must be in [0, num_stages={pipeline.num_stages}), got {stage}")
    if any(size < 1 for size in group_sizes):
        raise ValueError(f"groups must be >= 1, got {list(group_sizes)}")
    groups = list(enumerate(group_sizes))
    first = 0
    for drained in [[group] for group in groups] if pipeline.flush else [groups]:
        yield from _until_drained(pipeline, stage, first, drained)
        first += sum(size for _, size in drained)


def _until_drained(pipeline: Pipeline, stage: int, first: int, groups: Sequence[tuple[int, int]]) -> Iterator[Action]:
    """Yield from an empty pipeline to an empty one; ``groups`` are (number, size), from micro-batch ``first`` on."""
    method, spec, last = pipeline.method, pipeline.spec, pipeline.num_stages - 1
    delay = pipeline.delays[stage]
    in_order = [(group, place, size) for group, size in groups for place in range(size)]
    where = dict(enumerate(in_order, start=first))  # of each micro-batch: its group, its place there, the group's size
    order = sorted(where, reverse=spec.last_in_first_out)
    num = len(order)

    for tick in range(num + delay):
        if tick < num:
            b = first + tick
            group, place, size = where[b]
            if method.weights == "2bw" and place == 0 and group != 1 and not pipeline.flush:
                yield Action(Op.WEIGHTS, max(group - 1, 0))
            op = Op.FORWARD_ONLY if method.recomputes(place, size, delay) else Op.FORWARD
            yield from _forward(op, b, stage, pipeline.num_stages, spec.local_losses)
            if spec.forward_lock and stage < last:
                yield Action(Op.RECV_GO, b)
            if spec.forward_lock and stage > 0:
                yield Action(Op.SEND_GO, b)
        if tick - delay >= 0:
            b = order[tick - delay]
            group, place, size = where[b]
            if method.recomputes(place, size, delay):
                yield Action(Op.RECOMPUTE, b)  # while the gradient is still on its way
            if stage < last and not spec.local_losses:
                yield Action(Op.RECV_GRAD, b)
            yield Action(Op.BACKWARD, b)
            if stage > 0 and not spec.local_losses:
                yield Action(Op.SEND_GRAD, b)
            if tick - delay + 1 == num or where[order[tick - delay + 1]][0] != group:
                yield Action(Op.UPDATE, group)


def evaluation_actions(stage: int, *, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield the actions of ``stage`` that evaluate: forwards only, with nothing kept; every method does the same."""
    for micro_batch in range(num_micro_batches):
        yield from _forward(Op.PREDICT, micro_batch, stage, num_stages)


def _forward(op: Op, b: int, stage: int, num_stages: int, every_stage_has_targets: bool = False) -> Iterator[Action]:
    first, last = stage == 0, stage == num_stages - 1
    yield Action(Op.LOAD if first else Op.RECV_ACT, b)
    if not first and (last or every_stage_has_targets):
        yield Action(Op.TAKE_TARGET if every_stage_has_targets else Op.RECV_TARGET, b)
    yield Action(op, b)
    if not last:
        yield Action(Op.SEND_ACT, b)
    if not last and (first or every_stage_has_targets):
        yield Action(Op.PASS_TARGET if every_stage_has_targets else Op.SEND_TARGET, b)
