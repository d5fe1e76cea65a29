"""Reasons for an uneven cut, and for a lack of possible cuts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

# Below this share of what K stages could add to the speed of one, a cut is called uneven.
LEAST_GAIN = 0.25


def is_uneven(loads: Sequence[float]) -> bool:
    """Return whether K stages with these ``loads`` are hardly faster than one."""
    return sum(loads) < (1 + LEAST_GAIN * (len(loads) - 1)) * max(loads)


def usual(reasons: Iterable[str]) -> str | None:
    """Return the most frequent reason, or None without reasons."""
    counts = Counter(reason for reason in reasons if reason)
    return max(counts, key=lambda reason: counts[reason], default=None)


def why_uneven(
    names: Sequence[str], reasons: Sequence[str], sizes: Sequence[int], loads: Sequence[float], *, of: str = "the work"
) -> str | None:
    """Return the cause of an uneven cut in a sentence, or None if it is even.

    The sentence names the stage with most of the work.

    Args:
        names: names of the model's units.
        reasons: for each unit, why there can be no cut after it; empty where there can be one.
        sizes: units of each stage.
        loads: the work of each stage, in any unit.
        of: the total that ``loads`` are shares of.
    """
    if len(sizes) < 2 or not is_uneven(loads):
        return None
    stage = max(range(len(loads)), key=lambda k: loads[k])
    stops = list(accumulate(sizes))
    start, last = stops[stage] - sizes[stage], stops[stage] - 1
    if start == last:
        units, because = names[start], "it is one unit"
    else:
        reason = usual(reasons[start:last])
        units = f"{names[start]} .. {names[last]}"
        because = "the links are too slow for a cut inside of it"
        if reason is not None:
            num_places = sum(1 for one in reasons[start:last] if not one)
            most = f"in {num_places} of {last - start} places only" if num_places else "nowhere"
            because = f"it can be cut {most}: {reason}"
    return f"stage {stage} ({units}) has {loads[stage] / sum(loads):.0%} of {of}, since {because}"
