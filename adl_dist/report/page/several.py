"""The content of the page that compares several runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from adl_dist.errors import ConfigError
from adl_dist.report.overhead import overhead_note, overhead_rows
from adl_dist.report.page import parts
from adl_dist.report.page.one_run import NO_TIMELINE, results, stage_table, title_of
from adl_dist.report.page.parts import MISSING, Curve, Part, chart, colour, places, table, text
from adl_dist.report.runs import Run, add_labels, comparable

LONGEST_LABEL = 48  # characters
MOST_CURVES = 18  # in one chart
NOT_COMPARED = ("run_dir", "resume")


def add_short_labels(runs: Sequence[Run]) -> None:
    """Label each run in a few words, unique among all, or by its folder."""
    with suppress(ConfigError):  # one has no settings
        add_labels(runs)
    labels = [f"{run.label} K={run.num_stages}" for run in runs]
    if len({*labels}) < len(labels):
        labels = [f"{label} seed={run.seed}" for label, run in zip(labels, runs, strict=True)]
    if len({*labels}) < len(labels) or max(map(len, labels)) > LONGEST_LABEL or not all(run.label for run in runs):
        labels = [f"{run.folder}: {title_of(run).partition(':')[0]}" for run in runs]
    for run, label in zip(runs, labels, strict=True):
        run.label = label


def _curves(runs: Sequence[Run]) -> Iterator[Part]:
    charts = list[Part]()
    for name in ("validation/loss", "validation/accuracy", "train/loss"):
        found = [(run.label, run.finite(name)) for run in runs[:MOST_CURVES] if run.finite(name)]
        for x, label in parts.AXES.items() if found and (name != "train/loss" or not charts) else ():
            drawn = [Curve(one, colour(n), places(points, x)) for n, (one, points) in enumerate(found)]
            charts.append(chart(name.replace("/", " "), label, drawn))
    shown = f" The first {MOST_CURVES} of {len(runs)} runs." if len(runs) > MOST_CURVES else ""
    caption = f"Seconds are without validation and saving. adl-dist compare draws medians over seeds.{shown}"
    yield parts.charts(charts, caption, "the loss; no run has records of it.")


def _overhead(runs: Sequence[Run]) -> Iterator[Part]:
    names = {str(run.folder): run.label for run in runs}
    if rows := overhead_rows(runs, names):
        yield table(rows)
        yield text(overhead_note(runs, names), "quiet")
    else:
        yield text("the loss of two runs, without which they cannot be compared.", MISSING)


def _stages(runs: Sequence[Run]) -> Iterator[Part]:
    yield from stage_table(runs)
    timelines = [(run.label, run.timeline) for run in runs if run.timeline is not None]
    for label, timeline in timelines:
        yield parts.shares(timeline, f"{label}: the time of each stage.")
    if not timelines:
        yield NO_TIMELINE


def _differences(runs: Sequence[Run]) -> Iterator[Part]:
    keys = [key for key, those in comparable(runs).items() if len({str(one.get(key, "")) for one in those}) > 1]
    if telling := [[key, *(str(run.settings.get(key, "")) for run in runs)] for key in keys if key not in NOT_COMPARED]:
        yield table([["setting", *(run.label for run in runs)], *telling], texts=range(1, len(runs) + 1))
    else:
        yield text("The settings of these runs are the same.")


SECTIONS: dict[str, Callable[[Sequence[Run]], Iterator[Part]]] = {
    "Results": results,
    "Learning curves": _curves,
    "Training to the same loss": _overhead,
    "Stages": _stages,
    "What differs": _differences,
}
