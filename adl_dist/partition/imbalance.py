"""Why a cut leaves most of the work to one stage, and why a model cannot be cut in more places."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

# Below this share of what K stages could add to the speed of one, a cut is called uneven.
LEAST_GAIN = 0.25


def is_uneven(loads: Sequence[float]) -> bool:
    """Whether one of K ``loads``, each at least 0, is so large that K stages are hardly faster than one."""
    return sum(loads) < (1 + LEAST_GAIN * (len(loads) - 1)) * max(loads)


def usual(reasons: Iterable[str]) -> str | None:
    """Return the reason that stands most often; None if there is none."""
    counts = Counter(reason for reason in reasons if reason)
    return max(counts, key=lambda reason: counts[reason], default=None)


def why_uneven(
    names: Sequence[str], reasons: Sequence[str], sizes: Sequence[int], loads: Sequence[float], *, of: str = "the work"
) -> str | None:
    """Return which stage has most of the work and why, in a sentence; None if the cut is not uneven.

    Args:
        names: those of the model's units.
        reasons: why there can be no cut after each unit; empty where there can be one.
        sizes: units of each stage.
        loads: the work of each stage, in any unit.
        of: what ``loads`` are shares of.
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
