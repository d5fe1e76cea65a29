"""The action streams, the delays and the staleness that follows from them."""

from collections.abc import Iterator, Sequence

from adl_dist.schedule.actions import Action, Op


def training_stream(stage: int, *, num_stages: int, delay: int, group_sizes: Sequence[int]) -> Iterator[Action]:
    """Yield what ``stage`` does to train on one segment.

    One tick is at most one forward, then one backward, then an update if a group is complete. Warm-up,
    steady state and drain need no code of their own; they follow from ``tick - delay``. K = 3, stage 0
    (delay 4), six micro-batches in groups of two:

        tick      0   1   2   3   4    5     6    7     8    9
        forward   F0  F1  F2  F3  F4   F5
        backward                  B0   B1    B2   B3    B4   B5
        update                         U0         U1         U2
                  |-- warm-up --| | steady | |----- drain -----|

    Args:
        stage: k in [0, K), 0 nearest the data. The paper's module index is k + 1.
        num_stages: K.
        delay: d, ticks from a micro-batch's forward to its backward on this stage.
        group_sizes: micro-batches of each group, in order; the same list for every stage, so all stages
            accumulate the same micro-batches (Algorithm 1, by batch).

    Raises:
        ValueError: stage, delay or a group size is out of range.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, num_stages={num_stages}), got {stage}")
    if delay < 0 or any(size < 1 for size in group_sizes):
        raise ValueError(f"delay must be >= 0 and groups >= 1, got {delay} and {list(group_sizes)}")

    last_of_group, end = {}, 0
    for group, size in enumerate(group_sizes):
        end += size
        last_of_group[end - 1] = group

    for tick in range(end + delay):
        forward, backward = tick, tick - delay
        if forward < end:
            yield from _forward(Op.FORWARD, forward, stage, num_stages)
        if backward >= 0:
            if stage < num_stages - 1:
                yield Action(Op.RECV_GRAD, backward)
            yield Action(Op.BACKWARD, backward)
            if stage > 0:
                yield Action(Op.SEND_GRAD, backward)
            if backward in last_of_group:
                yield Action(Op.UPDATE, last_of_group[backward])


def evaluation_stream(stage: int, *, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield what ``stage`` does to evaluate: forwards only, with nothing kept."""
    for micro_batch in range(num_micro_batches):
        yield from _forward(Op.PREDICT, micro_batch, stage, num_stages)


def _forward(op: Op, micro_batch: int, stage: int, num_stages: int) -> Iterator[Action]:
    first, last = stage == 0, stage == num_stages - 1
    yield Action(Op.LOAD if first else Op.RECV_ACT, micro_batch)
    if last and not first:
        yield Action(Op.RECV_TARGET, micro_batch)
    yield Action(op, micro_batch)
    if not last:
        yield Action(Op.SEND_ACT, micro_batch)
    if first and not last:
        yield Action(Op.SEND_TARGET, micro_batch)


def staleness(micro_batch: int, *, delay: int, accumulation_steps: int) -> int:
    """Level of staleness of one gradient: updates of its stage between its forward and its own update.

    With delay d and M accumulation steps, micro-batch b of a segment has

        LoS(b) = floor(b / M) - floor(max(0, b - d) / M),

    which is ceil((d - i) / M) for offset i = b mod M once b >= d (paper, Eq. 17).

    Args:
        micro_batch: b, counted from 0 within the segment: a segment starts with an empty pipeline.
        delay: d of the stage.
        accumulation_steps: M.

    Returns:
        A count of updates (weight versions), not of ticks or micro-batches.
    """
    return micro_batch // accumulation_steps - max(0, micro_batch - delay) // accumulation_steps


def steady_staleness(*, delay: int, accumulation_steps: int) -> list[int]:
    """Staleness of offsets 0..M-1 of a full group in steady state; its mean is exactly d / M."""
    return [-((offset - delay) // accumulation_steps) for offset in range(accumulation_steps)]
