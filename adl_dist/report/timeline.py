"""``run_dir/timeline.json``: the actions of a few updates."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adl_dist.report.files import write_atomically
from adl_dist.schedule.actions import LINKS, RECEIVES, Op

TIMELINE = "timeline.json"
_SHARE = {
    **dict.fromkeys((Op.FORWARD, Op.FORWARD_ONLY, Op.PREDICT_GRADIENT), "forward"),
    **dict.fromkeys((Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.LEARN), "backward"),
    Op.RECOMPUTE: "recompute",
    **dict.fromkeys((Op.UPDATE, Op.UPDATE_HEAD, Op.UPDATE_TIED), "update"),
    **dict.fromkeys(RECEIVES, "wait"),
    **dict.fromkeys((Op.LOAD, *LINKS), "load, send"),
}
SHARES = (*dict.fromkeys(_SHARE.values()), "other")


class Timed(NamedTuple):
    """One action of a stage, with begin and end in seconds."""

    op: str
    number: int
    begin: float
    end: float
    staleness: int | None  # of a backward, in updates


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The actions of some stages, on one clock."""

    epoch: int
    device: str  # on a GPU the times are those in which the host launched the work
    is_steady: bool  # whether all stages were at work all the time
    stages: Sequence[Sequence[Timed]]

    @classmethod
    def join(cls, parts: Sequence["Timeline"]) -> "Timeline":
        """Join the stages of ``parts`` on a clock that begins with an action."""
        stages = [stage for part in parts for stage in part.stages]
        zero = min(stage[0].begin for stage in stages)
        return cls(
            epoch=parts[0].epoch,
            device=parts[0].device,
            is_steady=all(part.is_steady for part in parts),
            stages=[
                [each._replace(begin=round(each.begin - zero, 7), end=round(each.end - zero, 7)) for each in stage]
                for stage in stages
            ],
        )

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, unless only an existing one is steady.

        Raises:
            OSError: If the file cannot be written.
        """
        path = folder / TIMELINE
        if self.is_steady or not path.exists():
            with write_atomically(path) as unfinished:
                unfinished.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Timeline":
        """Read a file of :meth:`write`.

        Raises:
            OSError, ValueError, TypeError, KeyError: If it is damaged.
        """
        content: dict[str, Any] = json.loads(path.read_text())
        stages = [[Timed(*each) for each in stage] for stage in content.pop("stages")]
        return cls(**content, stages=stages)

    def median_seconds(self, stage: int, *ops: Op) -> float | None:
        """Return the sum of the median times of some actions, or None."""
        times = [[each.end - each.begin for each in self.stages[stage] if each.op == op.value] for op in ops]
        return sum(median(of_op) for of_op in times if of_op) if any(times) else None

    def shares(self, stage: int) -> dict[str, float]:
        """Return the shares of the time of ``stage``, which add up to 1."""
        events = self.stages[stage]
        length = max(events[-1].end - events[0].begin, 1e-9)
        spent = dict.fromkeys(SHARES, 0.0)
        for each in events:
            spent[_SHARE.get(Op(each.op), "other")] += (each.end - each.begin) / length
        spent["other"] += 1.0 - sum(spent.values())
        return spent
