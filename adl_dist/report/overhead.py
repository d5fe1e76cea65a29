"""The training that a run needs to reach the losses of a reference."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy

from adl_dist.report.runs import REFERENCE, Point, Run

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the updates of the reference, after which its loss is a goal
WINDOWS = 50  # for the moving average of a training loss, in the updates of the reference
NEVER = "not reached"
NOTE = (
    "To the lowest {loss} that the reference had reached after 25, 50, 75 and 100 % of its updates: "
    "updates / samples / seconds of training, and the samples relative to those of the reference."
)


class Reached(NamedTuple):
    """The training done when a loss was reached, linearly interpolated."""

    updates: float
    samples: float
    seconds: float

    @classmethod
    def at(cls, point: Point) -> "Reached":
        """Return the training done at a point of a curve."""
        return cls(point.update + 1, point.samples, point.seconds)


class Goal(NamedTuple):
    """A loss of the reference, and the training until each run reached it."""

    loss: float
    reference: Reached
    run: Reached | None  # None: never reached

    @property
    def ratio(self) -> float | None:
        """The run's samples, or else updates, over those of the reference."""
        place = 1 if self.reference.samples else 0
        return None if self.run is None else self.run[place] / self.reference[place]


def goals(run: Run, reference: Run) -> list[Goal]:
    """Return the goals set by ``reference`` for ``run``, or [] without losses."""
    _, own, other = _losses(run, reference)
    if not own or not other:
        return []
    updates, values = [point.update + 1 for point in other], [point.value for point in other]
    found = []
    for share in SHARES:
        end = share * updates[-1]
        if end >= updates[0]:  # the lowest value until then, linear between two records
            until = [value for update, value in zip(updates, values, strict=True) if update <= end]
            loss = min(*until, float(numpy.interp(end, updates, values)))
            there = first_reach(other, loss)
            assert there is not None
            found.append(Goal(loss, there, first_reach(own, loss)))
    return found


def overhead_note(runs: Sequence[Run], names: Mapping[str, str], reference: Run | None = None) -> str:
    """Return the explanation of :func:`overhead_rows`, with the reference."""
    first = reference or nearest_reference(runs[0], runs)
    of = f"Reference: {names[str(first.folder)]}."
    if reference is None and first.method["name"] == REFERENCE:
        of = f"Reference: the run of {REFERENCE} that is most like the row's (model, data, M, K, seed)."
    elif reference is None:
        of = f"Reference: the first run, {names[str(first.folder)]}; adl-dist compare takes another: reference=RUN."
    return f"{NOTE.format(loss=f'{_losses(first, first)[0]} loss')} {of}"


def first_reach(curve: Sequence[Point], loss: float) -> Reached | None:
    """Return the training until a curve first falls to ``loss``, or None."""
    place = next((place for place, point in enumerate(curve) if point.value <= loss), None)
    if not place:
        return None if place is None else Reached.at(curve[0])
    a, b = curve[place - 1], curve[place]
    part = (a.value - loss) / (a.value - b.value)
    return Reached(*(x + part * (y - x) for x, y in zip(Reached.at(a), Reached.at(b), strict=True)))


def nearest_reference(run: Run, runs: Sequence[Run]) -> Run:
    """Return the run of BP most similar to ``run``, or the first of ``runs``.

    The model decides first, then the data, M, K and the seed.
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


def overhead_rows(runs: Sequence[Run], names: Mapping[str, str], reference: Run | None = None) -> list[list[str]]:
    """Return a table with a row for each run that has losses, or [].

    Args:
        runs: the runs.
        names: the name of each run, by its folder.
        reference: the run that sets the goals, by default the most similar run of BP.
    """
    table = []
    for run in runs:
        cells = ["."] * len(SHARES)
        for place, goal in enumerate(reversed(found := goals(run, reference or nearest_reference(run, runs))), 1):
            cells[-place] = NEVER
            if goal.run is not None:
                updates, samples, seconds = goal.run
                cells[-place] = f"{updates:,.0f} / {samples:,.0f} / {seconds:,.1f} s = {goal.ratio:.2f}x"
        table += [[names[str(run.folder)], *cells]] if found else []
    return [["run", *(f"{share:.0%}" for share in SHARES)], *table] if table else []


def _losses(run: Run, reference: Run) -> tuple[str, list[Point], list[Point]]:
    """Return the kind of loss to compare, and its curves of both runs.

    It is the validation loss if that was measured often enough, otherwise the moving average of the training loss.
    """
    curves = [one.finite("validation/loss") for one in (run, reference)]
    if all(curves) and curves[1][0].update + 1 <= SHARES[0] * (curves[1][-1].update + 1):
        return "validation", curves[0], curves[1]
    curves = [one.finite("train/loss") for one in (run, reference)]
    width = max(1, len(curves[1]) // WINDOWS)
    return "training", moving_average(curves[0], width), moving_average(curves[1], width)


def moving_average(curve: Sequence[Point], width: int) -> list[Point]:
    """Return the mean of each point and the ``width - 1`` points before it."""
    sums = [0.0]
    for point in curve:
        sums.append(sums[-1] + point.value)
    return [
        point._replace(value=(sums[i] - sums[max(i - width, 0)]) / min(i, width)) for i, point in enumerate(curve, 1)
    ]
