"""``adl-dist report RUN [RUN...]``: make a page about runs. No torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from adl_dist.cli.compare import chosen_runs
from adl_dist.errors import ConfigError
from adl_dist.report.comparison import folders_below
from adl_dist.report.page import REPORT, write_page
from adl_dist.report.recorder import METRICS


def report(arguments: Sequence[str]) -> None:
    """Write the page to ``out=FILE``, or into the runs' common folder."""
    paths, out, above = chosen_runs("report", arguments, out="FILE.html")
    out = above / REPORT if out is None else out
    if not out.name or out.is_dir():
        raise ConfigError(f"out={out} is a folder; name the file, like out=report.html")
    write_page(_runs(paths), out)
    sys.stdout.write(f"written: {out}; it opens in any browser\n")


def _runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs in ``paths``, also those without config.yaml."""
    found = [run for path in paths for run in ([path] if (path / METRICS).is_file() else folders_below([path]))]
    return list(dict.fromkeys(found))
