"""``adl-dist compare RUNS...``: make a table, a CSV file and a figure from run folders. No torch."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report import comparison


def compare(arguments: Sequence[str]) -> None:
    """Compare the runs in or below the named folders; write to ``out=FOLDER``, else to the folder that holds all."""
    outs = [Path(each.removeprefix("out=")) for each in arguments if each.startswith("out=")]
    paths = [Path(each.removeprefix("run_dir=")) for each in arguments if not each.startswith("out=")]
    if not paths or len(outs) > 1:
        raise ConfigError("adl-dist compare takes run folders: adl-dist compare RUNS... [out=FOLDER]")
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    out = outs[0] if outs else above
    text = comparison.compare(paths, out=out, command=shlex.join(["adl-dist", "compare", *arguments]))
    sys.stdout.write(f"{text}\nwritten to {out}: comparison.md, comparison.csv, curves.svg, curves.png\n")
