"""The logs of a run.

An entry is a line with a time, and the lines after it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RESUMED = "resumed from"  # how the entry of a start from a checkpoint begins
HEAD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) (.*)")


class Entry(NamedTuple):
    """One entry of a log."""

    rank: str  # the log's name, like "rank0"
    time: str
    level: str  # as logging calls it
    text: str


def read_logs(folder: Path) -> list[Entry]:
    """Return the log entries of all processes by time; OSError if unreadable."""
    entries = [entry for path in sorted((folder / "logs").glob("rank*.log")) for entry in _entries(path)]
    return sorted(entries, key=lambda entry: entry.time)


def _entries(path: Path) -> Iterator[Entry]:
    entry: Entry | None = None
    with path.open(errors="replace") as file:
        for line in file:
            if (head := HEAD.match(line)) is not None:
                if entry is not None:
                    yield entry
                entry = Entry(path.stem, *head.groups())
            elif entry is not None:
                entry = entry._replace(text=f"{entry.text}\n{line.rstrip()}")
    if entry is not None:
        yield entry
