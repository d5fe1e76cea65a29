"""``adl-dist compare RUNS...`` and ``report RUNS...``: tables, figures and pages of runs. No torch."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from adl_dist.checkpoint.storage import local_run
from adl_dist.errors import ConfigError
from adl_dist.report import comparison
from adl_dist.report.page import REPORT, write_page
from adl_dist.report.recorder import METRICS


def compare(arguments: Sequence[str]) -> None:
    """Compare runs, and write to ``out=FOLDER`` or their common folder."""
    chosen = [word.removeprefix("reference=") for word in arguments if word.startswith("reference=")]
    if len(chosen) > 1:
        raise ConfigError(f"adl-dist compare takes one reference=RUN, got {len(chosen)}")
    rest = [word for word in arguments if not word.startswith("reference=")]
    paths, out, above = chosen_runs("compare", rest, out="FOLDER")
    folder, command = above if out is None else out, shlex.join(["adl-dist", "compare", *arguments])
    reference = local_run(chosen[0]) if chosen else None
    text = comparison.compare(paths, out=folder, reference=reference, command=command)
    sys.stdout.write(f"{text}\nwritten to {folder}: comparison.md, comparison.csv, curves.svg, curves.png\n")


def report(arguments: Sequence[str]) -> None:
    """Write the page to ``out=FILE``, or into the runs' common folder."""
    paths, out, above = chosen_runs("report", arguments, out="FILE.html")
    out = above / REPORT if out is None else out
    if not out.name or out.is_dir():
        raise ConfigError(f"out={out} is a folder; name the file, like out=report.html")
    below = [[path] if (path / METRICS).is_file() else comparison.folders_below([path]) for path in paths]
    write_page(list(dict.fromkeys(run for runs in below for run in runs)), out)
    sys.stdout.write(f"written: {out}; it opens in any browser\n")


def chosen_runs(command: str, arguments: Sequence[str], *, out: str) -> tuple[list[Path], Path | None, Path]:
    """Return the folders of ``arguments``, their ``out``, and their parent.

    ``out`` is None if it is not given. The parent holds all the folders.

    Raises:
        ConfigError: If there is no folder, or more than one ``out``.
    """
    outs = [Path(each.removeprefix("out=")) for each in arguments if each.startswith("out=")]
    runs = [each.removeprefix("run_dir=") for each in arguments if not each.startswith("out=")]
    if not outs and (urls := [run for run in runs if "://" in run]):
        raise ConfigError(f"adl-dist {command} reads a copy of {urls[0]}; say where to write by out={out}")
    paths = [local_run(run) for run in runs]
    if not paths or len(outs) > 1:
        raise ConfigError(f"adl-dist {command} takes run folders: adl-dist {command} RUNS... [out={out}]")
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    return paths, outs[0] if outs else None, above
