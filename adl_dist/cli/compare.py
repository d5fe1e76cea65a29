"""``adl-dist compare RUNS...``: make a table, a CSV file and a figure from run folders. No torch."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import read_runs


def compare(words: Sequence[str]) -> None:
    """Compare the runs in the folders that are named, and write and print the comparison.

    Args:
        words: run folders, or folders that hold some at any depth; ``out=FOLDER``: where to write instead of the
            folder that holds all of them.

    Raises:
        ConfigError: a folder holds no run, or the output folder cannot be made.
    """
    outs = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    paths = [Path(word) for word in words if not word.startswith("out=")]
    if not paths or len(outs) > 1:
        raise ConfigError("adl-dist compare takes run folders: adl-dist compare RUNS... [out=FOLDER]")
    folders = list(dict.fromkeys(folder for path in paths for folder in run_folders(path)))
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    out = Path(outs[0]) if outs else above
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = write_comparison(out, read_runs(folders), command=shlex.join(["adl-dist", "compare", *words]))
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}; give another out=") from error
    sys.stdout.write(f"{text}\nwritten to {out}: comparison.md, comparison.csv, curves.svg, curves.png\n")


def run_folders(path: Path) -> Iterable[Path]:
    """Return the run folders at or below ``path``, which are those with a config.yaml.

    Raises:
        ConfigError: there are none.
    """
    folders = sorted(file.parent for file in path.glob("**/config.yaml"))
    if not folders:
        raise ConfigError(f"{path} holds no run: expected the folder of a run, or one that holds such folders")
    return folders
