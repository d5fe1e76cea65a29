"""``adl-dist report RUN [RUN...]``: make a page about a run, or one that compares several. No torch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report.page import REPORT, write_page


def report(arguments: Sequence[str]) -> None:
    """Write the page to ``out=FILE``, else into the run folder, or into the one that holds all of several."""
    outs = [Path(each.removeprefix("out=")) for each in arguments if each.startswith("out=")]
    paths = [Path(each.removeprefix("run_dir=")) for each in arguments if not each.startswith("out=")]
    if not paths or len(outs) > 1 or any(str(path).startswith("-") for path in paths):
        raise ConfigError("adl-dist report takes run folders: adl-dist report RUN [RUN...] [out=FILE.html]")
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder; expected that of a run: adl-dist report RUN [RUN...]")
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    out = outs[0] if outs else above / REPORT
    write_page(paths, out)
    sys.stdout.write(f"{out}\n")
