"""The actions of a few updates, and schedules, as spans of time to draw."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from adl_dist.report.files import write_atomically
from adl_dist.schedule.actions import BACKWARDS, LINKS, RECEIVES, Action, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.timing import FORWARDS, Costs, Span, in_processes, simulate, ticks

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

# Okabe and Ito's colours, which colour-blind people tell apart: face, text.
STYLES = {
    Op.FORWARD: ("#56B4E9", "black", "forward"),
    Op.FORWARD_ONLY: ("#C9E6F7", "black", "forward, input kept only"),
    Op.RECOMPUTE: ("#F0E442", "black", "forward again"),
    Op.BACKWARD: ("#E69F00", "black", "backward"),
    Op.BACKWARD_INPUT: ("#E69F00", "black", "I: backward, without gradients of weights"),
    Op.BACKWARD_WEIGHT: ("#009E73", "white", "WG: gradients of weights"),
    Op.LEARN: ("#CC79A7", "black", "the head learns"),
}
# Lengths in a tick, in forwards: a backward costs about two, each of its parts one.
LENGTHS = {Op.RECOMPUTE: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1, Op.LEARN: 1}
BOXES = (*STYLES, Op.UPDATE)
SMALL = (Op.LOAD, *LINKS)  # drawn in measured pictures


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
        """Join the stages of ``parts`` on a clock that starts at the first action."""
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
        """Write timeline.json; if it exists, only a steady timeline replaces it.

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
        """Return the sum over ``ops`` of a stage's median seconds, or None."""
        times = [[each.end - each.begin for each in self.stages[stage] if each.op == op.value] for op in ops]
        return sum(median(of_op) for of_op in times if of_op) if any(times) else None

    def shares(self, stage: int) -> dict[str, float]:
        """Return the shares of ``stage``'s time by activity, which add up to 1."""
        events = self.stages[stage]
        length = max(events[-1].end - events[0].begin, 1e-9)
        spent = dict.fromkeys(SHARES, 0.0)
        for each in events:
            spent[_SHARE.get(Op(each.op), "other")] += (each.end - each.begin) / length
        spent["other"] += 1.0 - sum(spent.values())
        return spent


def spans_of_schedule(pipeline: Pipeline, num_micro_batches: int) -> list[Span]:
    """Return the spans of a schedule from an empty pipeline on, in ticks."""
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    return list(spans_of_ticks(ticks(lists, turns=turns)))


def spans_of_ticks(table: Sequence[Mapping[int, Sequence[Action]]]) -> Iterator[Span]:
    """Yield spans in ticks: in each tick the forward, then the others."""
    in_ticks = [actions for row in table for actions in row.values()]
    is_split = any(a.op is Op.BACKWARD_INPUT for actions in in_ticks for a in actions)
    lengths = {**LENGTHS, Op.BACKWARD: 1} if is_split else LENGTHS
    parts = 1 + max(sum(lengths.get(a.op, 0) for a in actions if a.op not in FORWARDS) for actions in in_ticks)
    for stage, row in enumerate(table):
        for tick, actions in row.items():
            end = tick + 1 / parts
            for action in actions:
                if action.op in FORWARDS:
                    yield Span(stage, action, tick, tick + 1 / parts)
                else:
                    start, end = end, end + lengths.get(action.op, 0) / parts
                    yield Span(stage, action, start, end)


def spans_of_timeline(timeline: Timeline) -> list[Span]:
    """Return the measured spans, in milliseconds."""
    return [
        Span(k, Action(Op(each.op), each.number), 1000 * each.begin, 1000 * each.end)
        for k, events in enumerate(timeline.stages)
        for each in events
    ]


def spans_with_free_links(pipeline: Pipeline, timeline: Timeline) -> list[Span]:
    """Return the scheduled spans of a timeline's updates, in milliseconds.

    Actions take the median of their measured times, and messages take no time. Return [] if the pipeline was not full
    all the time, or a time was not measured.
    """
    costs = costs_of(timeline)
    if costs is None or not timeline.is_steady:
        return []
    M, begins = pipeline.micro_batches_per_update, pipeline.updates_to_fill
    firsts = [each.number for each in timeline.stages[0] if each.op == Op.UPDATE.value]
    shift, num_updates = firsts[0] - begins, len(firsts)
    lists, turns = in_processes(pipeline, num_micro_batches=M * (2 * begins + num_updates + 2))
    found, made = list[Span](), [-1] * pipeline.num_stages  # the update that each stage made last
    for span in simulate(lists, costs, turns=turns):
        op, number, *_ = span.action
        if op is Op.UPDATE:
            made[span.stage] = number
        if begins <= made[span.stage] < begins + num_updates:
            by = shift if op is Op.UPDATE else shift * M
            found.append(span._replace(action=Action(op, number + by)))
    return found


def costs_of(timeline: Timeline) -> Costs | None:
    """Return the median times of stages in ms, or None if one is missing."""
    # A stage runs one of both kinds of forward.
    kinds = (Op.FORWARD, Op.FORWARD_ONLY), (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    stages = range(len(timeline.stages))
    forward, backward, late, update = (
        [1000 * (timeline.median_seconds(k, *ops) or 0.0) for k in stages]
        for ops in (*kinds, (Op.BACKWARD_WEIGHT,), (Op.UPDATE,))
    )
    if not all(forward) or not all(backward):
        return None
    return Costs(forward=forward, backward=backward, backward_weight=late, update=update)


def window(spans: Sequence[Span], num_stages: int) -> list[Span]:
    """Return ``spans`` clipped to the time in which all stages have spans.

    Times are counted from the beginning of that time.
    """
    if not spans:
        return []
    stages = range(num_stages)
    begin = max(min(span.start for span in spans if span.stage == k) for k in stages)
    end = min(max(span.end for span in spans if span.stage == k) for k in stages)
    return [
        span._replace(start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
        for span in spans
        if begin <= span.end and span.start <= end
    ]


def arrows(boxes: Sequence[Span], messages: Sequence[tuple[int, Action]]) -> Iterator[tuple[Span, Span, bool]]:
    """Yield (producing span, consuming span, is activation) of each message.

    Args:
        boxes: the spans that are drawn.
        messages: receiving stage and action of each message.
    """
    made = {
        (box.stage, box.action.op in FORWARDS, box.action.number): box
        for box in boxes
        if box.action.op in (*FORWARDS, *BACKWARDS)
    }
    learning = {(box.stage, box.action.number): box for box in boxes if box.action.op is Op.LEARN}
    for stage, (op, number, *_) in messages:
        is_act = op is Op.RECV_ACT
        if is_act or op is Op.RECV_GRAD:
            tail = made.get((stage - 1 if is_act else stage + 1, is_act, number))
            head = made.get((stage, is_act, number))
            if not is_act:
                head = learning.get((stage, number)) or head
            if tail is not None and head is not None:  # otherwise outside of the picture
                yield tail, head, is_act
