"""Pictures of schedules: a lane per stage, boxes and arrows."""

from pathlib import Path
from statistics import median

from adl_dist.errors import ConfigError
from adl_dist.report.page import render
from adl_dist.report.page.parts import CSS, lanes, nice_ticks, timelines
from adl_dist.report.timeline import STYLES, spans_of_ticks
from adl_dist.schedule.actions import BACKWARDS, Op
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.table import figures, title
from adl_dist.schedule.timing import FORWARDS, Costs, in_processes, simulate, ticks

MOST_TICKS = 400  # more cannot be read
NARROWEST, UPDATE, LETTER, WIDEST = 26.0, 15.0, 8.0, 24_000.0  # of a forward to the picture, in pixels
COLOURS = [(CSS[op], face) for op, (face, _, _) in STYLES.items()] + [("update", "#333"), ("small", "#8c8c8c")]
NOTE = "Numbers: micro-batch; of U the group. LoS: updates of the stage between a forward and its own update."


def draw(pipeline: Pipeline, path: Path, *, num_micro_batches: int, costs: Costs | None = None) -> None:
    """Draw a segment into an SVG file, the same bytes for the same schedule.

    Args:
        pipeline: the schedule.
        path: the file.
        num_micro_batches: length of the segment.
        costs: times of the actions; without them the axis counts ticks.

    Raises:
        ConfigError: If ``path`` is not an SVG file or cannot be written, or there are too many ticks.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"--out {path} must end in .svg, of which browsers make other formats")
    lists, turns = in_processes(pipeline, num_micro_batches=num_micro_batches)
    table = ticks(lists, turns=turns)
    num_ticks = max((max(row) + 1 for row in table if row), default=0)
    if num_ticks > MOST_TICKS:
        fewer = f"lower --micro-batches, which is {num_micro_batches}"
        raise ConfigError(f"a picture of {num_ticks} ticks cannot be read; expected at most {MOST_TICKS}: {fewer}")
    spans = list(spans_of_ticks(table)) if costs is None else simulate(lists, costs, turns=turns)
    length = max(span.end for span in spans)
    usual = median(span.end - span.start for span in spans if span.action.op in FORWARDS) or length / len(spans)
    width = min(length / usual * max(NARROWEST, LETTER * len(str(num_micro_batches)) + 8), WIDEST)
    least = UPDATE * length / width  # an update without a duration covers the end of its backward
    spans = [s._replace(start=min(s.start, s.end - least)) if s.action.op is Op.UPDATE else s for s in spans]
    messages = [(stage, action) for stage, actions in enumerate(lists) for action in actions]
    stale = {s: pipeline.staleness(s.stage, s.action.number) for s in spans if s.action.op in BACKWARDS}
    drawn = lanes("", spans, length, stale.get, messages)
    for place, box in enumerate(drawn["boxes"]):
        if box[0] != "update" and box[3] / 100 * width < LETTER * len(box[5]):
            drawn["boxes"][place] = (*box[:5], "", box[6])  # the number does not fit
    name, facts = title(pipeline, num_micro_batches=num_micro_batches).rsplit(": ", 1)
    axis = "Ticks" if costs is None else "Time in the unit of the costs"
    part = timelines([drawn], pipeline.num_stages, length, axis, NOTE)
    part["ticks"] = [(100 * t / length, f"{t:g}") for t in nice_ticks(0.0, length, most=max(4, round(width / 60)))]
    shown = {"title": name, "facts": facts, "part": part, "stages": figures(pipeline)}
    render("schedule.svg.j2", path, **shown, colours=COLOURS, width=round(width))
