"""A schedule as a person reads it."""

from adl_dist.schedule.actions import Op
from adl_dist.schedule.methods import METHODS, Method
from adl_dist.schedule.segment import Segment
from adl_dist.schedule.streams import steady_staleness, training_stream


def ticks(stage: int, *, num_stages: int, delay: int, group_sizes: list[int]) -> list[str]:
    """The forward, backward and update of each tick of ``stage``, for example ``F4 B0`` or ``F5 B1 U0``."""
    shown: list[list[str]] = []
    forwarded = sum(group_sizes)
    for action in training_stream(stage, num_stages=num_stages, delay=delay, group_sizes=group_sizes):
        starts = action.op is Op.FORWARD or (action.op is Op.BACKWARD and action.number + delay >= forwarded)
        if starts:
            shown.append([])
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE):
            shown[-1].append(str(action))
    return [" ".join(words) for words in shown]


def describe(method: Method, *, num_stages: int, num_micro_batches: int) -> str:
    """The tick table of all stages and each stage's delay, in-flight count and staleness.

    A message takes one tick, so stage k starts k ticks after stage 0. Processes keep the order of a row,
    not its columns: nothing in a run waits for a tick.
    """
    segment = Segment(
        epoch=0,
        first_update=0,
        num_samples=num_micro_batches,
        micro_batch_size=1,
        accumulation_steps=method.accumulation_steps,
    )
    delays = [method.delay(k, num_stages=num_stages) for k in range(num_stages)]
    rows = [
        [""] * k + ticks(k, num_stages=num_stages, delay=d, group_sizes=segment.group_sizes)
        for k, d in enumerate(delays)
    ]
    width = max(len(cell) for row in rows for cell in row)
    header = [str(tick) for tick in range(max(map(len, rows)))]
    lines = [
        f"{METHODS[method.name].summary}: K = {num_stages} stages, M = {method.accumulation_steps}, "
        f"{method.weights} weights, {num_micro_batches} micro-batches",
        "",
        "tick     " + "  ".join(cell.ljust(width) for cell in header).rstrip(),
        *(f"stage {k}".ljust(9) + "  ".join(cell.ljust(width) for cell in row).rstrip() for k, row in enumerate(rows)),
        "",
        "F forward, B backward, U update; the number is the micro-batch, of U the group",
        "",
        "stage  delay  in flight  staleness by offset (updates)  mean  max",
    ]
    for k, delay in enumerate(delays):
        by_offset = steady_staleness(delay=delay, accumulation_steps=method.accumulation_steps)
        lines.append(
            f"{k:<7}{delay:<7}{delay + 1:<11}{' '.join(map(str, by_offset)):<31}"
            f"{sum(by_offset) / len(by_offset):<6.3g}{max(by_offset)}"
        )
    return "\n".join(lines)
