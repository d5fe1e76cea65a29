"""Parts of a stage's list of actions, with their messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from adl_dist.schedule.actions import Action, Op, Tie
from adl_dist.schedule.pipeline import Pipeline


class Place(NamedTuple):
    """The place of a micro-batch in its group."""

    group: int
    offset: int  # in its group
    size: int  # of its group, in micro-batches


def places_of(groups: Sequence[tuple[int, int]]) -> list[Place]:
    """Return the place of each micro-batch of ``groups``, (number, size)."""
    return [Place(group, offset, size) for group, size in groups for offset in range(size)]


def forward_part(pipeline: Pipeline, stage: int, b: int, place: Place) -> Iterator[Action]:
    """Yield the forward of micro-batch ``b`` in training, with its messages."""
    method, last = pipeline.method, pipeline.num_stages - 1
    if method.weights == "2bw" and place.offset == 0 and place.group != 1 and not pipeline.flush:
        yield Action(Op.WEIGHTS, max(place.group - 1, 0))
    keeps_input_only = method.recomputes(place.offset, place.size, pipeline.delays[stage])
    op = Op.FORWARD_ONLY if keeps_input_only else Op.FORWARD
    yield from forward(
        op, b, stage, pipeline.num_stages, method.passes_targets, predicts_gradient=pipeline.spec.predicts_gradients
    )
    if pipeline.spec.forward_lock and stage < last:
        yield Action(Op.RECV_GO, b)
    if pipeline.spec.forward_lock and stage > 0:
        yield Action(Op.SEND_GO, b)


def backward_part(op: Op, pipeline: Pipeline, stage: int, b: int, place: Place) -> Iterator[Action]:
    """Yield the backward of micro-batch ``b``, whole or in part, and messages."""
    exchanges, awaits = not pipeline.spec.local_losses, not pipeline.spec.has_heads
    if pipeline.method.recomputes(place.offset, place.size, pipeline.delays[stage]):
        yield Action(Op.RECOMPUTE, b)  # while the gradient is still on its way
    if stage < pipeline.num_stages - 1 and awaits:
        yield Action(Op.RECV_GRAD, b)
    yield Action(op, b)
    if stage > 0 and exchanges:
        yield Action(Op.SEND_GRAD, b)


def ends_of(groups: Sequence[tuple[int, int]], first: int = 0) -> dict[int, int]:
    """Return the last micro-batch of each group, counted from ``first`` on."""
    ends, stop = {}, first
    for group, size in groups:
        stop += size
        ends[group] = stop - 1
    return ends


def gradient_part(pipeline: Pipeline, stage: int, group: int, ends: Mapping[int, int]) -> Iterator[Action]:
    """Yield the exchange of the gradients of ``group`` before its update.

    The gradients of tied copies are added up. The gradient norms travel upstream, if stages clip by the norm of the
    model. ``ends`` is the result of :func:`ends_of`.
    """
    ties = pipeline.ties_of(stage)
    for tie in ties:
        if stage != tie.stages[0]:
            yield Action(Op.SEND_PART, ends[group], tie, stage)
    for tie in ties:
        if stage == tie.stages[0]:
            for op in (Op.RECV_PART, Op.SEND_SUM):
                yield from (Action(op, ends[group], tie, holder) for holder in tie.stages[1:])
    if pipeline.shares_norms and stage < pipeline.num_stages - 1:
        yield Action(Op.RECV_NORM, ends[group])
    if pipeline.shares_norms and stage > 0:
        yield Action(Op.SEND_NORM, ends[group])


def update_part(
    pipeline: Pipeline, stage: int, group: int, ends: Mapping[int, int], *, tied_apart: bool = False
) -> Iterator[Action]:
    """Yield the update with ``group``, after the norm of the whole gradient.

    A stage passes this norm on before it updates. Then tied weights are updated with the sum of the group that is due
    (:meth:`Pipeline.tie_delay`), unless ``tied_apart``. ``ends`` is the result of :func:`ends_of`.
    """
    if pipeline.shares_norms and stage > 0:
        yield Action(Op.RECV_TOTAL, ends[group])
    if pipeline.shares_norms and stage < pipeline.num_stages - 1:
        yield Action(Op.SEND_TOTAL, ends[group])
    yield Action(Op.UPDATE, group)
    for tie in () if tied_apart else pipeline.ties_of(stage):
        if (due := group - pipeline.tie_delay(tie)) in ends:
            yield from _tied_update(stage, tie, due, ends[due])


def tied_updates_left(
    pipeline: Pipeline, stage: int, ends: Mapping[int, int], *, tied_apart: bool = False
) -> Iterator[Action]:
    """Yield the tied updates that remain after the last update of ``ends``."""
    for group, end in ends.items():
        for tie in pipeline.ties_of(stage):
            if tied_apart or group + pipeline.tie_delay(tie) not in ends:
                yield from _tied_update(stage, tie, group, end)


def _tied_update(stage: int, tie: Tie, group: int, end: int) -> Iterator[Action]:
    if stage != tie.stages[0]:
        yield Action(Op.RECV_SUM, end, tie, stage)
    yield Action(Op.UPDATE_TIED, group, tie, stage)


def forward(
    op: Op,
    b: int,
    stage: int,
    num_stages: int,
    every_stage_has_targets: bool = False,
    *,
    predicts_gradient: bool = False,
) -> Iterator[Action]:
    """Yield the forward ``op`` of micro-batch ``b`` with its messages."""
    first, last = stage == 0, stage == num_stages - 1
    yield Action(Op.LOAD if first else Op.RECV_ACT, b)
    if not first and (last or every_stage_has_targets):
        yield Action(Op.TAKE_TARGET if every_stage_has_targets else Op.RECV_TARGET, b)
    yield Action(op, b)
    if not last and predicts_gradient:
        yield Action(Op.PREDICT_GRADIENT, b)
    if not last:
        yield Action(Op.SEND_ACT, b)
    if not last and (first or every_stage_has_targets):
        yield Action(Op.PASS_TARGET if every_stage_has_targets else Op.SEND_TARGET, b)
