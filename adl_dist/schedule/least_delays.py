"""The least delays that keep full speed, by measured times."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, combinations

from adl_dist.schedule.methods import Method
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.timing import Costs, time_per_update

AS_FAST = 1.02  # of the time at full speed
STEPS = 4  # per micro-batch's work: the round trip is lengthened by such steps for each hop
LONGEST = 3 * STEPS  # the most steps tried
SEARCHED = 6  # most stages for which lists are searched step by step; more would take minutes


def with_least_delays(method: Method, costs: Costs) -> Method:
    """Return ``method`` with the least delays that keep its full speed.

    If these exceed ``Method.longest_delay``, the method gets the fastest delays within that bound.
    """
    longest = method.longest_delay(len(costs.forward))
    if method.weights != "2bw":  # it cannot be tried with longer ones
        delays = _least_delays(method, costs)
        if delays[0] <= longest:
            return method.with_delays(delays)
    return method.with_delays(_least_delays(method, costs, most=longest))


def _least_delays(method: Method, costs: Costs, most: int | None = None) -> tuple[int, ...]:
    """Return the least delays, up to ``most``, that are as fast as long ones.

    A gradient comes back to stage k after the work of all later stages and twice the time of the links. The
    micro-batches that the slowest stage does in that time are the least that keep it busy. A fixed order of actions may
    need some more, which is tried in the timing model.
    """
    K, M = len(costs.forward), method.micro_batches_per_update
    stages = (f + b + u / M for f, b, u in zip(costs.forward, costs.backward, costs.update, strict=True))
    slowest = max(*stages, costs.busiest_link)
    trips = _round_trips(method, costs)
    # Deferred parts may have to be done before the update that the next forward waits for.
    last_parts = costs.backward_weight if method.split_backward else [0.0] * K

    @cache
    def time(delays: tuple[int, ...]) -> float:
        return time_per_update(Pipeline(method.with_delays(delays), K), costs)

    def lengthened(number: int) -> tuple[int, ...]:
        """Return delays that are ``number`` steps longer per hop.

        Each hop gets the same, because unevenly falling delays are slow.
        """
        longer = [number * slowest / STEPS * (K - 1 - k) for k in range(K)]
        return _delays([sum(parts) for parts in zip(trips, last_parts, longer, strict=True)], slowest, most)

    least = _delays(trips, slowest, most)
    tried = [least, *map(lengthened, range(LONGEST + 1))]
    if most is not None:  # bounded delays fall too slowly
        best = min([*tried, *_evenly(most, K)], key=time)
        tried.append(_descended(best, most, time) if K <= SEARCHED else best)
    fastest = time(tried[-1])
    allowed = AS_FAST * max(fastest, M * slowest)
    delays = next(delays for delays in tried if time(delays) <= allowed)
    for k in range(K - 1):  # shorten what is longer than needed, the largest delay first
        while delays[k] > max(least[k], delays[k + 1]):
            fewer = (*delays[:k], delays[k] - 1, *delays[k + 1 :])
            if time(fewer) > allowed:
                break
            delays = fewer
    return delays


def _evenly(most: int, K: int) -> list[tuple[int, ...]]:
    """Return delays that fall from ``most`` to 0 evenly, or in whole steps."""
    slopes = [most / (K - 1) if K > 1 else 0, *range(1, most)]
    lists = [tuple(max(most - math.floor(slope * k + 0.5), 0) for k in range(K - 1)) for slope in slopes]
    return [(*delays, 0) for delays in lists]


def _descended(delays: tuple[int, ...], most: int, time: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """Return ``delays`` improved greedily, by +-1 on runs of adjacent stages."""
    rows = [range(first, end) for first, end in combinations(range(len(delays)), 2)]  # the last stage has no delay
    while True:
        changed = [tuple(d + by * (k in row) for k, d in enumerate(delays)) for row in rows for by in (-1, 1)]
        possible = [d for d in changed if d[0] <= most and list(d) == sorted(d, reverse=True)]
        best = min(possible, key=time, default=delays)
        if time(best) >= time(delays) * (1 - 1e-9):
            return delays
        delays = best


def _round_trips(method: Method, costs: Costs) -> list[float]:
    """Return the time from a forward's start to its backward's end, per stage."""
    back = costs.backward_input if method.split_backward else costs.backward
    ways = [*map(sum, zip(costs.transfer, costs.transfer_back, strict=True)), 0.0]
    stages = zip(costs.forward, back, [*costs.link, 0.0], ways, strict=True)
    one_by_one = [f + b + 2 * link + way for f, b, link, way in stages]
    return list(accumulate(reversed(one_by_one)))[::-1]


def _delays(times: Sequence[float], slowest: float, most: int | None) -> tuple[int, ...]:
    """Return the delays that cover ``times`` at ``slowest`` per micro-batch.

    The micro-batch in flight is not counted. Delays never rise from stage to stage, and are ``most`` at most.
    """
    delays = [max(math.ceil(time / slowest - 1e-9) - 1, 0) for time in times]
    delays = list(accumulate(reversed(delays), max))[::-1]  # never less than that of the next stage
    return tuple(delays if most is None else [min(d, most) for d in delays])
