"""What is planted into the starts of one run, drawn by its seed."""

import enum
import errno
import random
from dataclasses import dataclass

from tools.faults.disk import DiskFault

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
    """Something happens before an action: which one, as a share of those left to do."""

    what: Step
    share: float


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The newest checkpoint loses the end of one of its files, or has a bit of it flipped.

    ``file`` is a share of the list of its files, and ``place`` a share of that file's bytes.
    """

    file: float
    place: float
    flips: bool


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is planted into one start of the run.

    Attributes:
        seed: draws which stage waits when, for a late message or without a reason.
        share_late: how often one does.
        most_late: for how many actions of the others at most; a thread in the background comes as late.
    """

    seed: int = 0
    share_late: float = 0.0
    most_late: int = 0
    fault: StepFault | DiskFault | None = None
    damage: Damage | None = None


def draw_plan(seed, *, num_events, stops):
    """The starts of a run; into the last one no fault is planted.

    ``num_events`` is what an undisturbed run does to the disk, by place; ``stops``: whether it may be asked to stop.
    """
    rng = random.Random(f"seed {seed}")
    num_faults = rng.choices(range(4), weights=(1, 6, 2, 1))[0]
    return [
        Attempt(
            seed=rng.randrange(1 << 30),
            share_late=rng.choice([0.0, 0.1, 0.5, 1.0]),
            most_late=rng.choice([1, 10, 100]),
            fault=_draw_fault(rng, num_events, stops=stops) if start < num_faults else None,
            damage=(
                Damage(file=rng.random(), place=rng.random(), flips=rng.random() < 0.5)
                if start and rng.random() < 0.4
                else None
            ),
        )
        for start in range(num_faults + 1)
    ]


def _draw_fault(rng, num_events, *, stops):
    steps = [Step.KILLED, Step.KILLED, Step.RAISES, *([Step.ASKED_TO_STOP] * 2 if stops else [])]
    kind = rng.choice([*steps, "killed at the disk", "killed at the disk", "fails", "fails"])
    if isinstance(kind, Step):
        return StepFault(what=kind, share=rng.random())
    place = rng.choices(["checkpoints", "metrics", "others"], weights=(8, 1, 1))[0]
    error, lasts = rng.choice(FAILURES) if kind == "fails" else (None, False)
    event = rng.randrange(num_events[place])
    return DiskFault(place=place, event=event, share=rng.choice([0.0, rng.random(), 1.0]), error=error, lasts=lasts)
