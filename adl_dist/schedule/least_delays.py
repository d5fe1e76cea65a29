"""The least delays with which a method keeps its full speed, for the times of given stages and links."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from adl_dist.schedule.methods import Method
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.timing import Costs, time_per_update

AS_FAST = 1.02  # of the time at full speed
STEPS = 4  # of a micro-batch's work, by which the round trip is lengthened for each hop until there is room for it,
LONGEST = 3 * STEPS  # and the most that is tried


def with_least_delays(method: Method, costs: Costs) -> Method:
    """Return ``method`` with the least delays, as a list, with which it is as fast as with long ones.

    A gradient comes back to stage k after the work of all stages from there on and the time of the links, twice. So
    many micro-batches as the slowest stage does in that time are the least that keep it at work. A list has its order
    fixed beforehand, which may take some more: that is tried out in the timing model.
    """
    K, M = len(costs.forward), method.micro_batches_per_update
    most = M if method.weights == "2bw" else None  # whose forward asks for no older weights
    slowest = max(f + b + u / M for f, b, u in zip(costs.forward, costs.backward, costs.update, strict=True))
    trips = _round_trips(method, costs)
    # What is put off may have to be done before the update that the next forward waits for.
    last_parts = costs.backward_weight if method.split_backward else [0.0] * K

    def time(delays: Sequence[int]) -> float:
        return time_per_update(Pipeline(replace(method, delay=tuple(delays)), K), costs)

    def lengthened(number: int) -> list[int]:
        """Return the delays with so many steps more for each hop: lists are slow where delays fall unevenly."""
        longer = [number * slowest / STEPS * (K - 1 - k) for k in range(K)]
        return _delays([sum(parts) for parts in zip(trips, last_parts, longer, strict=True)], slowest, most)

    least, ample = _delays(trips, slowest, most), lengthened(LONGEST)
    allowed = AS_FAST * max(time(ample), M * slowest)
    delays = next((d for d in (least, *map(lengthened, range(LONGEST))) if time(d) <= allowed), ample)
    for k in range(K - 1):  # what a stage does not need goes, the one with the largest delay first
        while delays[k] > max(least[k], delays[k + 1]):
            fewer = [*delays[:k], delays[k] - 1, *delays[k + 1 :]]
            if time(fewer) > allowed:
                break
            delays = fewer
    return replace(method, delay=tuple(delays))


def _round_trips(method: Method, costs: Costs) -> list[float]:
    """Return the time from the begin of a forward on each stage to the end of its backward that sends a gradient."""
    back = costs.backward_input if method.split_backward else costs.backward
    stages = zip(costs.forward, back, [*costs.link, 0.0], strict=True)
    one_by_one = [f + b + 2 * link for f, b, link in stages]
    return list(accumulate(reversed(one_by_one)))[::-1]


def _delays(times: Sequence[float], slowest: float, most: int | None) -> list[int]:
    """Return how many micro-batches are done in these times, besides the one that is on its way; at least 0."""
    delays = [max(math.ceil(time / slowest - 1e-9) - 1, 0) for time in times]
    delays = list(accumulate(reversed(delays), max))[::-1]  # never less than that of the next stage
    return delays if most is None else [min(d, most) for d in delays]
