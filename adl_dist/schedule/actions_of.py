"""The action streams, and the staleness that follows from them."""

from collections.abc import Iterator, Sequence

from adl_dist.schedule.actions import Action, Op
from adl_dist.schedule.methods import Method


def training_actions(method: Method, stage: int, *, num_stages: int, group_sizes: Sequence[int]) -> Iterator[Action]:
    """Yield what ``stage`` does to train on one segment.

    One tick is at most one forward, then one backward, then an update if a group is complete. Warm-up,
    steady state and drain need no code of their own; they follow from ``tick - delay``. ADL, K = 3, stage 0
    (delay 4), six micro-batches in groups of two:

        tick      0   1   2   3   4    5     6    7     8    9
        forward   F0  F1  F2  F3  F4   F5
        backward                  B0   B1    B2   B3    B4   B5
        update                         U0         U1         U2
                  |-- warm-up --| | steady | |----- drain -----|

    A method that flushes does so after each group: its groups are stretches of their own.

    Args:
        method: whose schedule.
        stage: k in [0, K), 0 nearest the data. The paper's module index is k + 1.
        num_stages: K.
        group_sizes: micro-batches of each group, in order; the same list for every stage, so all stages
            accumulate the same micro-batches (Algorithm 1, by batch).

    Raises:
        ValueError: stage or a group size is out of range.
        ConfigError: the method's delays do not fit K.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, num_stages={num_stages}), got {stage}")
    if any(size < 1 for size in group_sizes):
        raise ValueError(f"groups must be >= 1, got {list(group_sizes)}")
    groups = list(enumerate(group_sizes))
    first = 0
    for stretch in [[group] for group in groups] if method.spec.flush else [groups]:
        yield from _stretch(method, stage, num_stages, first, stretch)
        first += sum(size for _, size in stretch)


def _stretch(
    method: Method, stage: int, num_stages: int, first: int, groups: Sequence[tuple[int, int]]
) -> Iterator[Action]:
    """From an empty pipeline to an empty pipeline; ``groups`` are (number, size), from micro-batch ``first`` on."""
    row, last = method.spec, num_stages - 1
    delay = method.delay_of(stage, num_stages=num_stages)
    group_of: dict[int, int] = {}
    place: dict[int, tuple[int, int]] = {}  # of a micro-batch in its group, and the group's size
    for group, size in groups:
        for i in range(size):
            b = first + len(group_of)
            group_of[b], place[b] = group, (i, size)
    order = sorted(group_of, reverse=row.last_in_first_out)
    num = len(order)

    for tick in range(num + delay):
        if tick < num:
            b = first + tick
            if method.weights == "2bw" and place[b][0] == 0 and group_of[b] != 1:
                yield Action(Op.WEIGHTS, max(group_of[b] - 1, 0))
            without_graph = method.recomputes(*place[b], delay)
            yield from _forward(
                Op.FORWARD_ONLY if without_graph else Op.FORWARD, b, stage, num_stages, row.local_losses
            )
            if row.forward_lock and stage < last:
                yield Action(Op.RECV_GO, b)
            if row.forward_lock and stage > 0:
                yield Action(Op.SEND_GO, b)
        if tick - delay >= 0:
            b = order[tick - delay]
            if method.recomputes(*place[b], delay):
                yield Action(Op.RECOMPUTE, b)  # while the gradient is still on its way
            if stage < last and not row.local_losses:
                yield Action(Op.RECV_GRAD, b)
            yield Action(Op.BACKWARD, b)
            if stage > 0 and not row.local_losses:
                yield Action(Op.SEND_GRAD, b)
            if tick - delay + 1 == num or group_of[order[tick - delay + 1]] != group_of[b]:
                yield Action(Op.UPDATE, group_of[b])


def evaluation_actions(stage: int, *, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield what ``stage`` does to evaluate: forwards only, with nothing kept."""
    for micro_batch in range(num_micro_batches):
        yield from _forward(Op.PREDICT, micro_batch, stage, num_stages)


def _forward(
    op: Op, micro_batch: int, stage: int, num_stages: int, every_stage_has_targets: bool = False
) -> Iterator[Action]:
    first, last = stage == 0, stage == num_stages - 1
    yield Action(Op.LOAD if first else Op.RECV_ACT, micro_batch)
    if every_stage_has_targets and not first:
        yield Action(Op.TAKE_TARGET, micro_batch)
    elif last and not first:
        yield Action(Op.RECV_TARGET, micro_batch)
    yield Action(op, micro_batch)
    if not last:
        yield Action(Op.SEND_ACT, micro_batch)
    if every_stage_has_targets and not last:
        yield Action(Op.PASS_TARGET, micro_batch)
    elif first and not last:
        yield Action(Op.SEND_TARGET, micro_batch)


def forward_version(method: Method, micro_batch: int, *, delay: int) -> int:
    """Updates of its segment that a stage has made, of which a micro-batch's forward sees the result.

    Micro-batch b meets the weights after floor(max(0, b - d) / M) updates; ``2bw`` asks for one before its group
    (and nothing older than the segment), a method that flushes for all before its group.

    Args:
        method: whose schedule.
        micro_batch: b, counted from 0 within the segment: a segment starts with an empty pipeline.
        delay: d of the stage.
    """
    M = method.micro_batches_per_update
    if method.spec.flush:
        return micro_batch // M
    if method.weights == "2bw":
        return max(0, micro_batch // M - 1)
    return max(0, micro_batch - delay) // M


def staleness(method: Method, micro_batch: int, *, delay: int) -> int:
    """Level of staleness of one gradient: updates of its stage between its forward and its own update.

    With delay d and M accumulation steps, micro-batch b of a segment has

        LoS(b) = floor(b / M) - floor(max(0, b - d) / M),

    which is ceil((d - i) / M) for offset i = b mod M once b >= d (paper, Eq. 17).

    Args:
        method: whose schedule.
        micro_batch: b, counted from 0 within the segment.
        delay: d of the stage.

    Returns:
        A count of updates (weight versions), not of ticks or micro-batches.
    """
    return micro_batch // method.micro_batches_per_update - forward_version(method, micro_batch, delay=delay)


def steady_staleness(method: Method, *, delay: int) -> list[int]:
    """Staleness of offsets 0..M-1 of a full group in steady state; its mean is d / M, but for flush and 2bw."""
    M = method.micro_batches_per_update
    group = delay // M + 2  # by then the pipeline is full
    return [staleness(method, group * M + offset, delay=delay) for offset in range(M)]
