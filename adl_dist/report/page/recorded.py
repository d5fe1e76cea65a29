"""The files of a run folder that only its page shows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adl_dist.report.logs import Entry, read_logs
from adl_dist.report.runs import START, Run, an_object
from adl_dist.report.timeline import TIMELINE, Timeline


@dataclass(kw_only=True)
class Files:
    """The content of these files, empty for missing and damaged ones.

    Attributes:
        start: command, host, device and units of stages of the newest start.
        units: the measured cost of each unit of the model.
        links: measured links.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    logs: Sequence[Entry] = ()
    units: Sequence[Mapping[str, Any]] = ()
    links: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """The number of units of each stage, as far as it is known."""
        return [int(of_stage[0]) for of_stage in self.start.get("stages", ())]


def read_files(run: Run) -> Files:
    """Read the files of ``run``; damaged ones become its problems."""
    return Files(
        start=run.load(START, lambda path: an_object(json.loads(path.read_text()))) or {},
        timeline=run.load(TIMELINE, lambda path: Timeline.read(path.parent)),
        logs=run.load("logs", lambda path: read_logs(path.parent)) or (),
        units=run.load("profile.json", lambda path: json.loads(path.read_text())["units"]) or (),
        links=run.load("links.json", lambda path: an_object(json.loads(path.read_text()))) or {},
    )
