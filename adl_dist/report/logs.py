"""The logs of a run.

An entry is a line with a time, and the lines after it.
"""

import re
from pathlib import Path
from typing import NamedTuple

RESUMED = "resumed from"  # how the entry of a start from a checkpoint begins
TIME = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} "
ENTRY = re.compile(rf"{TIME}([A-Z]+) (.*(?:\n(?!{TIME[1:]}).*)*)", re.MULTILINE)


class Entry(NamedTuple):
    """One entry of a log."""

    rank: str  # the log's name, like "rank0"
    time: str
    level: str  # as logging calls it
    text: str


def read_logs(folder: Path) -> list[Entry]:
    """Return the log entries of all processes by time; OSError if unreadable."""
    texts = {path.stem: path.read_text(errors="replace") for path in sorted((folder / "logs").glob("rank*.log"))}
    entries = [Entry(rank, *found.group(1, 2, 3)) for rank, text in texts.items() for found in ENTRY.finditer(text)]
    return sorted(entries, key=lambda entry: entry.time)
