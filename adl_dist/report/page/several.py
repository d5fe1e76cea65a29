"""The page that compares several runs."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report.curves import draw_curves
from adl_dist.report.page import drawings
from adl_dist.report.page.markup import Html, Section, bar, escaped, figure, missing, page, paragraph, table
from adl_dist.report.page.one_run import DAMAGE, ENDINGS, NO_TIMELINE, footer, title_of, value_text
from adl_dist.report.page.recorded import Recorded, read
from adl_dist.report.progress import holders
from adl_dist.report.runs import flatten, measure_of, read_runs

LONGEST_LABEL = 48  # characters
MOST_CURVES = 18  # in one figure
NOT_COMPARED = ("run_dir", "resume")


def page_of_runs(folders: Sequence[Path]) -> str:
    """Return the page that compares the runs in ``folders``.

    Raises:
        ConfigError: a folder holds no run.
    """
    runs = [read(folder) for folder in folders]
    labels = labels_of(runs)
    parts: dict[str, Callable[[], Sequence[Html]]] = {
        "Results": lambda: _results(runs, labels),
        "Learning curves": lambda: _curves(runs, labels),
        "Medians over seeds": lambda: _medians(folders),
        "Stages": lambda: _stages(runs, labels),
        "What differs": lambda: _differences(runs, labels),
    }
    sections = [Section(name, _shown(part)) for name, part in parts.items()]
    problems = [paragraph(f"{run.folder}: {text}", "bad") for run in runs for text in run.problems]
    hint = Html(f"About one of them: <code>adl-dist report {escaped(folders[0])}</code>")
    return page(f"{len(runs)} runs compared", [paragraph(hint, "quiet"), *problems], sections, footer())


def _shown(part: Callable[[], Sequence[Html]]) -> Sequence[Html]:
    try:
        return part()
    except DAMAGE as error:
        return [paragraph(f"Cannot be shown ({type(error).__name__}: {' '.join(str(error).split())[:300]}).", "bad")]


def labels_of(runs: Sequence[Recorded]) -> list[str]:
    """Return a short label for each run, unique among all, or its folder."""
    try:
        made = read_runs(run.folder for run in runs)
        labels = [f"{run.label} K={run.num_stages}" for run in made]
        if len({*labels}) < len(labels):
            labels = [f"{label} seed={run.seed}" for label, run in zip(labels, made, strict=True)]
        if len({*labels}) == len(labels) and max(map(len, labels)) <= LONGEST_LABEL:
            return labels
    except ConfigError:  # one was not made by the command line
        pass
    names = [run.folder.resolve().name for run in runs]
    if len({*names}) < len(names):
        names = [str(run.folder) for run in runs]
    return [f"{name}: {title_of(run).partition(':')[0]}" for name, run in zip(names, runs, strict=True)]


def _results(runs: Sequence[Recorded], labels: Sequence[str]) -> Sequence[Html]:
    names = list(dict.fromkeys(name for run in runs for name in run.summary if name.startswith("validation_")))
    speeds = [run.summary.get("tokens_per_second", run.summary.get("samples_per_second")) for run in runs]
    most = max((speed for speed in speeds if speed is not None), default=1.0)
    head = [
        "run",
        *(name.replace("_", " ") for name in names),
        "updates",
        "training",
        "speed",
        "staleness",
        "memory",
        "",
    ]
    rows: list[Sequence[object]] = [head]
    for run, label, speed in zip(runs, labels, speeds, strict=True):
        summary = run.summary
        stages = summary.get("stages", ())
        stale = [stage["staleness_mean"] for stage in stages]
        peak = max((one["peak_memory_bytes"] for one in holders(summary)), default=None)
        rows.append([
            label,
            *(value_text(name, summary[name]) if name in summary else "" for name in names),
            summary.get("updates", ""),
            f"{summary['train_seconds']:,.1f} s" if "train_seconds" in summary else "",
            "" if speed is None else bar(f"{value_text('', speed)} {run.unit}/s", speed / most),
            f"{statistics.mean(stale):.3f}" if stale else "",
            "" if peak is None else f"{peak / 2**20:,.0f} MiB",
            ENDINGS[run.status][1].partition(":")[0].lower().removeprefix("it ") if run.status != "complete" else "",
        ])  # fmt: skip
    note = "Staleness: mean over the stages, in updates. Memory: of the process that held most."
    return [table(rows, text_columns=(head.index("speed"),)), paragraph(note, "quiet")]


def _curves(runs: Sequence[Recorded], labels: Sequence[str]) -> Sequence[Html]:
    parts = list[Html]()
    for name in ("validation/loss", "validation/accuracy", "train/loss"):
        found = {label: run.curves[name] for run, label in zip(runs, labels, strict=True) if run.curves.get(name)}
        if name == "train/loss" and parts:
            continue
        if found:
            shown = dict(list(found.items())[:MOST_CURVES])
            left_out = f" The first {MOST_CURVES} of {len(found)} runs." if len(found) > len(shown) else ""
            title = name.replace("/", " ")
            text = f"{title.capitalize()}, by epoch and by seconds of training.{left_out}"
            parts.append(figure(drawings.curves_of_runs(shown, title), text, name=title.replace(" ", "-")))
    return parts or [missing("no run has records of a loss.")]


def _medians(folders: Sequence[Path]) -> Sequence[Html]:
    try:
        runs = read_runs(folders)
    except ConfigError as error:
        return [paragraph(f"For runs of the command line only: {error}.", "missing")]
    seeds = {run.seed for run in runs}
    if len(seeds) < 2:
        return [missing(f"other seeds; all runs have seed {min(seeds)}.")]
    text = "Line: median over the seeds; band: their range. A panel for each K; adl-dist compare has the table."
    return [figure(draw_curves(runs, measure_of(runs)), text, name="medians")]


def _stages(runs: Sequence[Recorded], labels: Sequence[str]) -> Sequence[Html]:
    K = max((len(run.summary.get("stages", ())) for run in runs), default=0)
    if not K:
        return [missing("no run has a summary.json, which is written at its end.")]
    parts = list[Html]()
    for title, name, form in (("busy", "busy_share", "{:.0%}"), ("mean staleness", "staleness_mean", "{:.3f}")):
        rows: list[Sequence[object]] = [[title, *(f"stage {k}" for k in range(K))]]
        for run, label in zip(runs, labels, strict=True):
            cells = [form.format(stage[name]) for stage in run.summary.get("stages", ())]
            rows.append([label, *cells, *[""] * (K - len(cells))])
        parts.append(table(rows))
    for run, label in zip(runs, labels, strict=True):
        if run.timeline is not None:
            text = f"{label}: what each stage did in the updates of its timeline."
            parts.append(figure(drawings.shares(run.timeline), text, name=f"shares{len(parts)}"))
    if not any(run.timeline is not None for run in runs):
        parts.append(missing(NO_TIMELINE))
    return parts


def _differences(runs: Sequence[Recorded], labels: Sequence[str]) -> Sequence[Html]:
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in NOT_COMPARED]
    telling = [key for key in keys if len({str(one.get(key, "")) for one in flat}) > 1]
    if not telling:
        return [paragraph("The settings of these runs are the same.")]
    rows = [["setting", *labels]] + [[key, *(str(one.get(key, "")) for one in flat)] for key in telling]
    return [table(rows, text_columns=range(1, len(runs) + 1))]
