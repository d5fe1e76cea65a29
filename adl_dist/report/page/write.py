"""Write the page of a run, or of several runs side by side."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from adl_dist import __version__
from adl_dist.errors import AdlError
from adl_dist.report.comparison import tables
from adl_dist.report.curves import draw_curves
from adl_dist.report.files import write_atomically
from adl_dist.report.page import markup, sections
from adl_dist.report.page.sections import Folder
from adl_dist.report.runs import Run, measure_of

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AdlError)


def write_page(path: Path, runs: Sequence[Run], *, trace: str) -> None:
    """Write one HTML file about ``runs``: all about a single one, or what tells several apart.

    ``trace``: the name of the file in a run folder that has the measured timeline.

    Raises:
        OSError: the file cannot be written.
    """
    page = _page_of_one(runs[0], trace) if len(runs) == 1 else _page_of_several(runs)
    with write_atomically(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def _page_of_one(run: Run, trace: str) -> str:
    folder = Folder.of(run)
    parts: list[tuple[str, Callable[[], str]]] = [
        ("Result", lambda: sections.result(folder)),
        ("Learning curves", lambda: sections.learning(folder)),
        ("Throughput", lambda: sections.speed(folder)),
        ("Stages: busy share and staleness", lambda: sections.stages(folder)),
        ("Measured timeline", lambda: sections.timeline(folder, trace)),
        ("Schedule", lambda: sections.schedule(folder)),
        ("Peak memory", lambda: sections.memory(folder)),
        ("Cut", lambda: sections.cut(folder)),
        ("Links", lambda: sections.links(folder)),
        ("Warnings", lambda: sections.notes(folder)),
        ("Settings", lambda: sections.settings(folder)),
    ]
    title = f"{run.label}, K = {run.num_stages}, seed {run.seed}"
    what = [str(run.config.get(key, {}).get("_target_", "own")) for key in ("model", "data")]
    return markup.document(title, f"{what[0]} on {what[1]}. {_origin(run.folder)}", _made(parts))


def _page_of_several(runs: Sequence[Run]) -> str:
    folders = [Folder.of(run) for run in runs]
    parts: list[tuple[str, Callable[[], str]]] = [
        ("Results", lambda: "".join(map(_as_html, tables(runs)))),
        ("Learning curves", lambda: markup.inline(draw_curves(runs, measure_of(runs)))),
        ("Runs", lambda: _table_of_runs(folders)),
    ]
    return markup.document(f"{len(runs)} runs", _origin(runs[0].folder.parent), _made(parts))


def _made(parts: Sequence[tuple[str, Callable[[], str]]]) -> list[tuple[str, str]]:
    """Return the sections; of what cannot be read, as in a damaged folder, the reason stands in its place."""
    made = []
    for heading, make in parts:
        try:
            body = make()
        except UNREADABLE as error:
            body = markup.missing(f"Cannot be shown: {type(error).__name__}: {error}")
        made.append((heading, body))
    return made


def _table_of_runs(folders: Sequence[Folder]) -> str:
    rows = [["run", "K", "seed", "ended", "samples / s", "busy", "staleness, mean", "folder"]]
    for folder in folders:
        run, stages = folder.run, folder.summary.get("stages", ())
        busy = " ".join(f"{stage['busy_share']:.0%}" for stage in stages)
        stale = " ".join(f"{stage['staleness_mean']:.3g}" for stage in stages)
        rate = folder.summary.get("samples_per_second")
        shown = "." if rate is None else f"{rate:,.0f}"
        rows.append([run.label, str(run.num_stages), str(run.seed), run.status, shown, busy, stale, str(run.folder)])
    return markup.table(rows)


def _as_html(block: str) -> str:
    """Return a Markdown table, and the sentence below it, as HTML."""
    lines = block.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    words = " ".join(line for line in lines if not line.startswith("|")).strip()
    return markup.table([cells[0], *cells[2:]]) + (markup.text(words) if words else "")


def _origin(folder: Path) -> str:
    return f"{folder}; page made on {datetime.now():%Y-%m-%d %H:%M} by adl_dist {__version__}."
