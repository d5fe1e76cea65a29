"""``adl-dist report RUN...``: write one HTML page about a run, or about several. No torch but for its version."""

import sys
from collections.abc import Sequence
from pathlib import Path

from adl_dist.cli.compare import chosen_runs
from adl_dist.errors import ConfigError
from adl_dist.monitor.trace import TRACE
from adl_dist.report.comparison import folders_below
from adl_dist.report.runs import read_runs

PAGE = "report.html"


def report(arguments: Sequence[str]) -> None:
    """Write ``out=FILE``, else report.html in the folder that holds all of the named runs."""
    paths, out, above = chosen_runs("report", arguments, out="FILE.html")
    page = above / PAGE if out is None else out
    write_report(page, paths)
    sys.stdout.write(f"written: {page}; it opens in any browser\n")


def write_report(page: Path, paths: Sequence[Path]) -> None:
    """Write the page of the runs in or below ``paths``.

    Raises:
        ConfigError: there is no run, or ``page`` cannot be written.
    """
    from adl_dist.report.page import write_page  # imported late: matplotlib takes a second

    runs = read_runs(folders_below(paths))
    try:
        write_page(page, runs, trace=TRACE)
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror}; give another place with out=") from error
