"""One page about one or several runs, as a single HTML file."""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adl_dist import __version__
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.files import write_atomically
from adl_dist.report.page import one_run, several
from adl_dist.report.page.parts import MISSING, text
from adl_dist.report.runs import DAMAGE, Run
from adl_dist.report.warning import warn

REPORT = "report.html"


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write the page about the runs in ``folders`` to the file ``out``.

    Raises:
        ConfigError: If a folder holds no run, or ``out`` cannot be written.
    """
    render("page.html.j2", out, **_content(folders), version=__version__)


def render(template: str, out: Path, **variables: Any) -> None:
    """Write a template, filled with ``variables``, to the file ``out``.

    Raises:
        ConfigError: If ``out`` cannot be written.
    """
    import jinja2  # imported late: few commands write a page

    loader = jinja2.PackageLoader("adl_dist.report", "page")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template(template).render(**variables)
    try:
        with write_atomically(out) as unfinished:
            unfinished.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another place") from error


def write_after_run(folder: Path) -> None:
    """Write ``folder/report.html`` at the end of a run; warn if that fails."""
    try:
        write_page([folder], folder / REPORT)
    except Exception as error:  # whatever is wrong with the page, the run is worth more
        warn(f"{folder / REPORT} could not be written ({in_one_line(error)}); the run itself is complete")


def _content(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the variables of the template."""
    runs: list[Run] = [Run(folder) for folder in folders]
    subject: Any
    found: dict[str, Callable[[Any], Iterable[Any]]]
    if len(runs) == 1:
        title, subject, found = one_run.title_of(runs[0]), runs[0], {**one_run.SECTIONS}
        head, facts = _shown(lambda: one_run.head(runs[0])), one_run.facts(runs[0])
    else:
        several.add_short_labels(runs)
        title, subject, found = f"{len(runs)} runs compared", runs, {**several.SECTIONS}
        head, facts = [], [("one of them", f"adl-dist report {shlex.quote(str(folders[0]))}")]
    parts = {name: _shown(partial(build, subject)) for name, build in found.items()}
    shown = {name: [part for part in each if part["kind"] != MISSING] for name, each in parts.items()}
    problems = [text(f"{run.folder.name}: {problem}", "bad") for run in runs for problem in run.problems]
    return {
        "title": title,
        "head": [*head, *problems],
        "facts": facts,
        "sections": [(re.sub(r"\W+", "-", name.lower()), name, each) for name, each in shown.items() if each],
        "missing": [(name, part["text"]) for name, each in parts.items() for part in each if part["kind"] == MISSING],
    }


def _shown(build: Callable[[], Iterable[Any]]) -> Sequence[Any]:
    """Return a section of the page, or a line with its error."""
    try:
        return list(build())
    except DAMAGE as error:
        reason = in_one_line(error)[:300]
        return [text(f"Cannot be shown: a file of the run is damaged or of another version ({reason}).", "bad")]
