"""``run_dir/trace.json``: the events of all stages, for https://ui.perfetto.dev or chrome://tracing.

Each rank writes the events of its stages into a file of its own; rank 0 then makes one of them and removes the parts.
The form is Chrome's "JSON Object Format": complete events, one process for each stage, times in microseconds.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adl_dist.distributed.procfs import machine
from adl_dist.distributed.world import World
from adl_dist.monitor.activity import KINDS, ActivityLog, Event, SegmentActivity
from adl_dist.schedule import Op

TRACE = "trace.json"
PARTS = "trace"  # a folder, while the file is made
MOST_EVENTS = 200_000  # kept of each stage, the first ones; about 30 MB of memory, and as much on disk


class Instant(NamedTuple):
    """A moment that processes of every machine can place on their own clock.

    Attributes:
        machine: the machine that read the clocks; see :func:`machine`.
        seconds: on ``time.perf_counter``, which the processes of one machine share.
        wall: seconds on ``time.time``, which NTP keeps alike on all machines.
    """

    machine: str
    seconds: float
    wall: float

    @classmethod
    def now(cls) -> "Instant":
        """Return the present moment."""
        return cls(machine(), time.perf_counter(), time.time())

    def on_this_clock(self) -> float:
        """Return the moment in seconds of this process's ``time.perf_counter``."""
        here = Instant.now()
        if here.machine == self.machine != "":
            return self.seconds
        return here.seconds - (here.wall - self.wall)


def write_part(
    log: ActivityLog, world: World, run_dir: Path, stages: Sequence[int], *, origin: Instant
) -> list[dict[str, Any]]:
    """Write this process's events.

    Args:
        log: the events.
        world: this process among the others.
        run_dir: the folder of the run.
        stages: the stages of this process.
        origin: the zero of the trace's time, taken on rank 0.

    Returns:
        For each stage its part, how many events it has there and how many were left out; or why there is none
        (``failed``), because the run is worth more than its trace.
    """
    part = run_dir / PARTS / f"rank{world.rank}.jsonl"
    began = origin.on_this_clock()
    try:
        part.parent.mkdir(exist_ok=True)
        with part.open("w") as file:
            for k in stages:
                for name, arguments in (
                    ("process_name", {"name": f"stage {k}"}),
                    ("process_sort_index", {"sort_index": k}),
                    ("thread_name", {"name": f"rank {world.rank}, {world.device}"}),
                ):
                    file.write(json.dumps({"ph": "M", "pid": k, "tid": 0, "name": name, "args": arguments}) + "\n")
                for segment in log.segments:
                    events = segment.stages[k].events
                    file.writelines(json.dumps(_chrome_event(segment, k, event, began)) + "\n" for event in events)
    except OSError as error:
        return [{"stage": k, "failed": f"rank {world.rank}: {error}"} for k in stages]
    return [
        {
            "stage": k,
            "part": part.name,
            "events": log.num_kept[k],
            "events_left_out": log.num_left_out[k],
            "seconds_to_rank_0": origin.seconds - began,
        }
        for k in stages
    ]


def merge_parts(run_dir: Path, results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Make one file of the parts, whole or not at all; on rank 0, when all are written.

    Args:
        run_dir: the folder of the run.
        results: what :func:`write_part` returned for all stages.
        about: the run, for the file's ``otherData``.

    Returns:
        The file.

    Raises:
        OSError: the file could not be written, or a part.
    """
    try:
        return _merge_parts(run_dir, results, about)
    finally:
        shutil.rmtree(run_dir / PARTS, ignore_errors=True)


def _merge_parts(run_dir: Path, results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    if failed := [result["failed"] for result in results if "failed" in result]:
        raise OSError("; ".join(dict.fromkeys(failed)))
    stages = [{name: value for name, value in result.items() if name != "part"} for result in results]
    parts = list(dict.fromkeys(result["part"] for result in results))
    unfinished = run_dir / PARTS / TRACE
    with unfinished.open("w") as file:
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {**about, "stages": stages}})
        file.write(head.removesuffix("}") + ', "traceEvents": [\n')
        comma = ""
        for part in parts:
            with (run_dir / PARTS / part).open() as lines:
                for line in lines:
                    file.write(comma + line.rstrip("\n"))
                    comma = ",\n"
        file.write("\n]}\n")
    os.replace(unfinished, run_dir / TRACE)
    return run_dir / TRACE


def _chrome_event(segment: SegmentActivity, stage: int, event: Event, origin: float) -> dict[str, Any]:
    # Whole nanoseconds first: rounded one by one, neighbours could overlap.
    begin, end = (round((at - origin) * 1e9) for at in (event.begin, event.end))
    share, name = KINDS[event.op]
    return {
        "ph": "X",
        "pid": stage,
        "tid": 0,
        "name": f"{name} {event.number}",
        "cat": share,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": _arguments(segment, event),
    }


def _arguments(segment: SegmentActivity, event: Event) -> dict[str, Any]:
    match event.op:
        case Op.UPDATE:
            arguments: dict[str, Any] = {"group": event.number, "update": segment.segment.first_update + event.number}
        case Op.WEIGHTS:
            arguments = {"updates_in_segment": event.number}
        case _:
            arguments = {"micro_batch": event.number}
    arguments |= {"action": f"{event.op.value}{event.number}", "version": event.version}
    if event.forward_version is not None:
        arguments["forward_version"] = event.forward_version
    return arguments | ({"epoch": segment.segment.epoch} if segment.training else {"evaluation": True})
