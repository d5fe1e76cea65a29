"""A comparison of runs: tables, a CSV file and a figure."""

import csv
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adl_dist import __version__
from adl_dist.errors import ConfigError
from adl_dist.report.files import write_atomically
from adl_dist.report.overhead import nearest_reference, overhead_note, overhead_rows, unlike
from adl_dist.report.progress import holders
from adl_dist.report.runs import ACCURACY, LOSS, REFERENCE, Measure, Run, measure_of, read_runs
from adl_dist.report.tables import counted, markdown_table

VALIDATION = "validation_"  # begins the names of metrics in summary.json
NOTHING, MINUS = ".", "\u2212"


def compare(
    run_dirs: Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    command: str = "adl_dist.compare",
) -> str:
    """Compare the runs in or below ``run_dirs``, as ``adl-dist compare`` does.

    Args:
        run_dirs: run folders, or folders that hold such folders.
        out: folder for comparison.md, comparison.csv, curves.svg and curves.png; by default nothing is written.
        reference: folder of the run whose losses all others are to reach; by default, for each run, the most
            similar run of backpropagation, or the first run if no such run is given.
        command: cited by comparison.md.

    Returns:
        The text of comparison.md: per method and K the results, and the distance to backpropagation; for each run the
        updates, samples and seconds until it reached the losses of the reference.

    Raises:
        ConfigError: If there is no run, a folder holds none, or ``out`` cannot be written.
    """
    paths = [Path(each) for each in run_dirs]
    if not paths:
        raise ConfigError("there is no run to compare; give folders of runs")
    chosen = [] if reference is None else [Path(reference)]
    runs, notes = _distinct(read_runs(dict.fromkeys([*chosen, *folders_below(paths)])))
    goal = runs[0] if chosen else None
    if out is None:
        return _text(_references_first(runs), command=command, reference=goal, notes=notes)
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        return write_comparison(Path(out), runs, command=command, reference=goal, notes=notes)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}; give another out=") from error


def folders_below(paths: Iterable[Path]) -> list[Path]:
    """Return all run folders in or below each path, or raise ConfigError."""
    folders: dict[Path, None] = {}
    for path in paths:
        below = list[Path]()
        for folder in sorted(file.parent for file in path.glob("**/config.yaml")):
            if not below or not folder.is_relative_to(below[-1]):  # wandb keeps a config.yaml inside of a run's folder
                below.append(folder)
        if not below:
            raise ConfigError(f"{path} holds no run: expected the folder of a run, or one that holds such folders")
        folders |= dict.fromkeys(below)
    return list(folders)


def _distinct(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Return ``runs`` without duplicates, and a line about each duplicate.

    Where equal settings and seed have different results, all runs of that label and K are labeled by their folders.
    """
    first, notes = dict[str, Run](), list[str]()
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in ("run_dir", "resume")}
        curves = [run.curves.get(name, ()) for name in ("train/loss", LOSS.name, ACCURACY.name)]
        kept = first.setdefault(repr((settings, [[point.value for point in curve] for curve in curves])), run)
        if kept is not run:
            notes.append(f"{run.folder} has the settings and results of {kept.folder}; counted once")
    alike: dict[tuple[str, int], list[Run]] = {}
    for run in first.values():
        alike.setdefault((run.label, run.num_stages), []).append(run)
    for several in (each for each in alike.values() if len({run.seed for run in each}) < len(each)):
        above = os.path.commonpath([run.folder.absolute().parent for run in several])
        for run in several:
            run.label += f" ({os.path.relpath(run.folder, above)})"
    return [*first.values()], notes


def write_comparison(
    folder: Path, runs: Sequence[Run], *, command: str, reference: Run | None = None, notes: Sequence[str] = ()
) -> str:
    """Write comparison.md (returned as text), comparison.csv and curves.

    ``notes`` are lines about runs that are left out.
    """
    from adl_dist.report.curves import draw_curves, save_figure  # imported late: matplotlib takes a second

    runs = _references_first(runs)
    text = _text(runs, command=command, reference=reference, notes=notes)
    with write_atomically(folder / "comparison.md") as unfinished:
        unfinished.write_text(text)
    further = dict.fromkeys(name for run in runs for name in run.result if name.startswith(VALIDATION))
    rows = [_csv_row(run) | {n: run.result.get(n) for n in further} for run in runs]
    with write_atomically(folder / "comparison.csv") as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    figure = draw_curves(runs, measure_of(runs))
    for suffix in (".svg", ".png"):
        with write_atomically(folder / f"curves{suffix}") as unfinished:
            save_figure(figure, unfinished)
    return text


def _references_first(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.method["name"] != REFERENCE)  # stable: otherwise as given


def _text(runs: Sequence[Run], *, command: str, reference: Run | None, notes: Sequence[str] = ()) -> str:
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    origin = (
        f"Command: `{command}`\n\n{counted(len(runs), 'run')}, seeds {seeds}; "
        f"compared with Python {platform.python_version()}, torch {version('torch')}, adl_dist {__version__}. "
        "Each run: `comparison.csv`; learning curves: `curves.svg`."
    )
    names = {str(run.folder): _name(run) for run in runs}
    goals = overhead_rows(runs, names, reference)
    reached = [_with_note(goals, overhead_note(runs, names, reference))] if goals else []
    return "\n\n".join([_table(runs, measure_of(runs)), *notes, *reached, *_memory_table(runs), origin]) + "\n"


def _with_note(rows: Sequence[Sequence[object]], note: str) -> str:
    return "\n".join([*markdown_table(rows), "", note])


def _table(runs: Sequence[Run], measure: Measure) -> str:
    stages, labels = sorted({run.num_stages for run in runs}), dict.fromkeys(run.label for run in runs)
    cells: dict[tuple[str, int], list[Run]] = {(label, K): [] for label in labels for K in stages}
    for run in runs:
        cells[run.label, run.num_stages].append(run)
    has_reference = any(run.method["name"] == REFERENCE for run in runs)
    rows = [["method", *(part for K in stages for part in (f"K = {K}", *[f"to {REFERENCE}"] * has_reference))]]
    for label in labels:
        row = [label]
        for here in (cells[label, K] for K in stages):
            row.append(_cell(here, measure))
            if has_reference:
                near = nearest_reference(here[0], runs) if here else None
                row.append(_difference(here, near, cells[near.label, near.num_stages], measure) if near else NOTHING)
        rows.append(row)
    name = measure.name.replace("/", " ").capitalize()
    note = f"{name} after the last epoch: median over the seeds that came there (min to max, seeds)."
    if has_reference:
        points = "percentage points" if measure.scale == 100 else "the figure itself"
        note += f" `to {REFERENCE}`: difference of the medians in {points}, to {REFERENCE} of the same model, "
        note += "with the same data and M if there is one."
    return _with_note(rows, note)


def _name(run: Run) -> str:
    continued = f", continued at update {run.first_update}" if run.first_update else ""
    return f"{run.label}, K = {run.num_stages}, seed {run.seed}{continued}"


def _memory_table(runs: Sequence[Run]) -> list[str]:
    """Return the table of memory, or [] if it was not measured."""
    measured = [run for run in runs if "peak_tensor_bytes" in (run.result.get("stages") or [{}])[0]]
    if not measured:
        return []
    most = max(run.num_stages for run in measured)
    rows = [["MiB of tensors", *(f"stage {k}" for k in range(most)), "mean", "largest"]]
    for run in measured:
        mebibytes = [stage["peak_tensor_bytes"] / 2**20 for stage in run.result["stages"]]
        shown = [f"{each:,.1f}" for each in (*mebibytes, statistics.mean(mebibytes), max(mebibytes))]
        rows.append([_name(run), *shown[:-2], *[NOTHING] * (most - len(mebibytes)), *shown[-2:]])
    note = (
        "The most that torch's allocator had handed out to each stage's process; on a GPU that is less than it holds "
        "(peak_active_bytes and peak_reserved_bytes in summary.json)."
    )
    return [_with_note(rows, note)]


def _cell(runs: Sequence[Run], measure: Measure) -> str:
    if not runs:
        return "not run"
    parts = []
    if values := measure.values(runs):
        low, middle, high = map(measure.text, (min(values), statistics.median(values), max(values)))
        parts.append(f"{middle}{measure.unit} ({low} to {high}, {len(values)})")
    for status in ("diverged", "unfinished"):
        if number := sum(run.status == status for run in runs):
            parts.append(f"**{number} of {len(runs)} {status}**")
    return ", ".join(parts or ["no validation"])


def _difference(runs: Sequence[Run], near: Run, references: Sequence[Run], measure: Measure) -> str:
    """Return the difference of the medians of ``runs`` and ``references``.

    ``near`` is one of ``references``.
    """
    values, reference_values = measure.values(runs), measure.values(references)
    is_reference = runs[0].method["name"] == REFERENCE
    if is_reference or unlike(runs[0], near, "model") or not values or not reference_values:
        return NOTHING
    difference = statistics.median(values) - statistics.median(reference_values)
    return f"{MINUS if difference < 0 else '+'}{measure.text(abs(difference))}"


def _csv_row(run: Run) -> dict[str, Any]:
    """Return the row of one run; missing figures stay empty.

    Times and staleness are since the run's last start.
    """
    summary, divergence = run.result, run.divergence if run.status == "diverged" else {}
    stages = summary.get("stages", [])
    accuracies, losses = ([point.value for point in run.finite(measure.name)] for measure in (ACCURACY, LOSS))
    tensor_bytes = [stage["peak_tensor_bytes"] for stage in stages if "peak_tensor_bytes" in stage]
    return {
        "label": run.label,
        "num_stages": run.num_stages,
        "accumulation_steps": run.accumulation_steps,
        "method": run.method["name"],
        "settings": json.dumps({k: v for k, v in run.method.items() if k != "name"}),
        "seed": run.seed,
        "status": run.status,
        "ended_at_update": divergence.get("update"),
        "ended_in_epoch": divergence.get("epoch"),
        "validation_accuracy": summary.get(ACCURACY.key),
        "best_validation_accuracy": max(accuracies, default=None),
        "validation_loss": summary.get(LOSS.key),
        "best_validation_loss": min(losses, default=None),
        **{name: summary.get(name) for name in ("epochs", "updates", "seconds", "samples_per_second")},
        "stage0_staleness_mean": stages[0]["staleness_mean"] if stages else None,
        "peak_memory_bytes": max((one["peak_memory_bytes"] for one in holders(summary)), default=None),
        "peak_tensor_bytes": max(tensor_bytes, default=None),
        "folder": run.folder,
    }
