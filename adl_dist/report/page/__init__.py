"""One page about one or several runs, as a single HTML file."""

from collections.abc import Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report.files import write_atomically
from adl_dist.report.warning import warn

REPORT = "report.html"


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write the page about the runs in ``folders`` to the file ``out``.

    Raises:
        ConfigError: a folder holds no run, or ``out`` cannot be written.
    """
    # Imported late: matplotlib takes half a second.
    from adl_dist.report.page.one_run import page_of_run
    from adl_dist.report.page.several import page_of_runs

    text = page_of_run(folders[0]) if len(folders) == 1 else page_of_runs(folders)
    try:
        with write_atomically(out) as unfinished:
            unfinished.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another place by out=FILE.html") from error


def write_after_run(folder: Path) -> None:
    """Write ``folder/report.html`` at the end of a run; warn if that fails."""
    try:
        write_page([folder], folder / REPORT)
    except Exception as error:  # whatever is wrong with the page, the run is worth more
        warn(f"{folder / REPORT} could not be written ({type(error).__name__}: {error}); the run itself is complete")
