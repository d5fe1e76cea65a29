"""The overhead of a run: the training it takes to reach another run's losses."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from adl_dist.report.runs import REFERENCE, Point, Run

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the updates of the reference, after which its loss is a goal
WINDOWS = 50  # for the moving average of a training loss, in the updates of the reference
NEVER = "not reached"
NOTE = (
    "To the lowest {loss} that the reference had reached after 25, 50, 75 and 100 % of its updates: "
    "updates / samples / seconds of training, and the samples relative to those of the reference."
)


class Reached(NamedTuple):
    """The training done when a loss was reached, linear between two records."""

    updates: float
    samples: float
    seconds: float

    @classmethod
    def at(cls, point: Point) -> "Reached":
        """Return the training done at a point of a curve."""
        return cls(point.update + 1, point.samples, point.seconds)


class Goal(NamedTuple):
    """A loss of the reference, and the training that each of two runs needed."""

    loss: float
    reference: Reached
    run: Reached | None  # None: never reached

    @property
    def ratio(self) -> float | None:
        """The samples of the run over those of the reference, or the updates."""
        place = 1 if self.reference.samples else 0
        return None if self.run is None else self.run[place] / self.reference[place]


def goals(run: Run, reference: Run) -> list[Goal]:
    """Return the goals that ``reference`` sets for ``run``; empty without losses."""
    _, own, other = _curves(run, reference)
    if not own or not other:
        return []
    num_updates = other[-1].update + 1
    found = []
    for loss in (_lowest(other, share * num_updates) for share in SHARES):
        if loss is not None and (there := first_reach(other, loss)) is not None:
            found.append(Goal(loss, there, first_reach(own, loss)))
    return found


def note(runs: Sequence[Run], names: Mapping[str, str], reference: Run | None = None) -> str:
    """Return the explanation of the table of :func:`rows`, with the reference."""
    first = reference or nearest_reference(runs[0], runs)
    of = f"Reference: {names[str(first.folder)]}."
    if reference is None and first.method["name"] == REFERENCE:
        of = f"Reference: the run of {REFERENCE} that is most like the row's (model, data, M, K, seed)."
    elif reference is None:
        of = f"Reference: the first run, {names[str(first.folder)]}; adl-dist compare takes another: reference=RUN."
    return f"{NOTE.format(loss=f'{_curves(first, first)[0]} loss')} {of}"


def first_reach(curve: Sequence[Point], loss: float) -> Reached | None:
    """Return the training at which a curve first has ``loss``, or None."""
    if curve and curve[0].value <= loss:
        return Reached.at(curve[0])
    for a, b in pairwise(curve):
        if b.value <= loss:
            part = (a.value - loss) / (a.value - b.value)
            return Reached(*(x + part * (y - x) for x, y in zip(Reached.at(a), Reached.at(b), strict=True)))
    return None


def nearest_reference(run: Run, runs: Sequence[Run]) -> Run:
    """Return the run of BP that is most like ``run``, or the first of ``runs``.

    The model comes first, then the data, M, K and the seed.
    """
    of_reference = [one for one in runs if one.method["name"] == REFERENCE]
    return min(
        of_reference or runs[:1],
        key=lambda one: (
            unlike(run, one, "model"),
            unlike(run, one, "data"),  # a micro-batch's size changes what BatchNorm computes, so M should be the same
            one.accumulation_steps != run.accumulation_steps,
            one.num_stages != run.num_stages,
            one.seed != run.seed,
        ),
    )


def unlike(one: Run, other: Run, part: str) -> int:
    """Return the number of different settings in a part of the configuration."""
    of_one, of_other = ({k: v for k, v in run.settings.items() if k.startswith(f"{part}.")} for run in (one, other))
    return sum(of_one.get(key) != of_other.get(key) for key in of_one.keys() | of_other.keys())


def rows(runs: Sequence[Run], names: Mapping[str, str], reference: Run | None = None) -> list[list[str]]:
    """Return a table with a row for each run that has losses.

    Args:
        runs: the runs.
        names: the name of each run, by its folder.
        reference: the run that sets the goals, by default the nearest of BP.
    """
    table = [["run", *(f"{share:.0%}" for share in SHARES)]]
    for run in runs:
        found = goals(run, reference or nearest_reference(run, runs))
        cells = ["." for _ in SHARES[len(found) :]] + [_cell(goal) for goal in found]
        if found:
            table.append([names[str(run.folder)], *cells])
    return table if len(table) > 1 else []


def _cell(goal: Goal) -> str:
    if goal.run is None or goal.ratio is None:
        return NEVER
    updates, samples, seconds = goal.run
    return f"{updates:,.0f} / {samples:,.0f} / {seconds:,.1f} s = {goal.ratio:.2f}x"


def _curves(run: Run, reference: Run) -> tuple[str, list[Point], list[Point]]:
    """Return which loss is compared, and the curves of it.

    It is that of the validation if that came often enough, otherwise the moving average of that of training.
    """
    curves = [one.finite("validation/loss") for one in (run, reference)]
    if all(curves) and curves[1][0].update + 1 <= SHARES[0] * (curves[1][-1].update + 1):
        return "validation", curves[0], curves[1]
    curves = [one.finite("train/loss") for one in (run, reference)]
    width = max(1, len(curves[1]) // WINDOWS)
    return "training", moving_average(curves[0], width), moving_average(curves[1], width)


def moving_average(curve: Sequence[Point], width: int) -> list[Point]:
    """Return a curve of the mean over each point and the ``width - 1`` before it."""
    sums = [0.0]
    for point in curve:
        sums.append(sums[-1] + point.value)
    return [
        point._replace(value=(sums[i] - sums[max(i - width, 0)]) / min(i, width)) for i, point in enumerate(curve, 1)
    ]


def _lowest(curve: Sequence[Point], updates: float) -> float | None:
    """Return the lowest value of a curve in its first ``updates``, or None."""
    values = [point.value for point in curve if point.update + 1 <= updates]
    for a, b in pairwise(curve):
        if a.update + 1 <= updates < b.update + 1:
            values.append(a.value + (b.value - a.value) * (updates - a.update - 1) / (b.update - a.update))
    return min(values, default=None)
