"""What is planted into the starts of one run, drawn by its seed."""

import enum
import errno
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tools.faults.disk import DiskFault
from tools.faults.order import Weather

# What the disk says, and whether it says so ever after: full for a moment or for good, one bad block, read-only.
FAILURES = ((errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EROFS, True))


class StageBroke(Exception):
    """What a user's own code may raise within a stage."""


class Step(enum.Enum):
    """What may happen between two actions."""

    KILLED = "the process is killed"
    RAISES = "a stage raises"
    ASKED_TO_STOP = "the run is asked to stop"


@dataclass(frozen=True, kw_only=True)
class StepFault:
    """Something happens before an action.

    Attributes:
        what: it.
        share: which action, as a share of those left to do.
    """

    what: Step
    share: float

    def __str__(self) -> str:
        return f"{self.what.value} after {self.share:.0%} of the actions"


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The newest checkpoint loses the end of one of its files, or has a bit of it flipped.

    Attributes:
        file: which, as a share of the list of them.
        place: where, as a share of its bytes.
        flips: whether it is a bit.
    """

    file: float
    place: float
    flips: bool

    def __str__(self) -> str:
        what = "a bit flipped" if self.flips else "all cut off"
        return f"{what} after {self.place:.0%} of a file of the newest checkpoint"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is planted into one start of the run."""

    weather: Weather
    fault: StepFault | DiskFault | None = None
    damage: Damage | None = None

    def __str__(self) -> str:
        return "; ".join(str(part) for part in (self.damage, self.weather, self.fault) if part is not None)


def draw_plan(seed: int, *, num_stages: int, num_events: Mapping[str, int], stops: bool) -> list[Attempt]:
    """The starts of a run; into the last one no fault is planted.

    Args:
        seed: of everything.
        num_stages: K.
        num_events: what an undisturbed run does to the disk, by place.
        stops: whether it may be asked to stop.
    """
    rng = random.Random(f"seed {seed}")
    num_faults = rng.choices(range(4), weights=(1, 6, 2, 1))[0]
    attempts = []
    for start in range(num_faults + 1):
        attempts.append(
            Attempt(
                weather=_draw_weather(rng, num_stages),
                fault=_draw_fault(rng, num_events, stops=stops) if start < num_faults else None,
                damage=_draw_damage(rng) if start and rng.random() < 0.4 else None,
            )
        )
    return attempts


def _draw_damage(rng: random.Random) -> Damage:
    return Damage(file=rng.random(), place=rng.random(), flips=rng.random() < 0.5)


def _draw_weather(rng: random.Random, num_stages: int) -> Weather:
    pauses = [(rng.randrange(num_stages), rng.randrange(400), rng.randint(1, 200)) for _ in range(rng.randrange(3))]
    return Weather(
        seed=rng.randrange(1 << 30),
        share_late=rng.choice([0.0, 0.1, 0.5, 1.0]),
        most_late=rng.choice([1, 10, 100]),
        pauses=tuple(pauses),
    )


def _draw_fault(rng: random.Random, num_events: Mapping[str, int], *, stops: bool) -> StepFault | DiskFault:
    steps = [Step.KILLED, Step.KILLED, Step.RAISES, *([Step.ASKED_TO_STOP] * 2 if stops else [])]
    kind = rng.choice([*steps, "killed at the disk", "killed at the disk", "fails", "fails"])
    if isinstance(kind, Step):
        return StepFault(what=kind, share=rng.random())
    place = rng.choices(["checkpoints", "metrics", "others"], weights=(8, 1, 1))[0]
    error, lasts = rng.choice(FAILURES) if kind == "fails" else (None, False)
    event = rng.randrange(num_events[place])
    return DiskFault(place=place, event=event, share=rng.choice([0.0, rng.random(), 1.0]), error=error, lasts=lasts)
