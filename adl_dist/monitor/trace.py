"""``run_dir/trace.json``: the events of all stages, for https://ui.perfetto.dev or chrome://tracing.

Each rank writes the events of its stages into a file of its own; rank 0 then makes one of them and removes the parts.
The form is Chrome's "JSON Object Format": complete events, one process for each stage, times in microseconds.
"""

import fileinput
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adl_dist.distributed.procfs import machine
from adl_dist.distributed.world import World
from adl_dist.monitor.activity import KINDS, ActivityLog
from adl_dist.schedule import Op

TRACE = "trace.json"
PARTS = "trace"  # a folder, while the file is made
MOST_EVENTS = 200_000  # kept of each stage, the first ones; about 30 MB of memory, and as much on disk


class Instant(NamedTuple):
    """A moment that processes of every machine can place on their own clock."""

    machine: str  # that read the clocks; see procfs.machine
    seconds: float  # on time.perf_counter, which the processes of one machine share
    wall: float  # seconds on time.time, which NTP keeps alike on all machines

    @classmethod
    def now(cls) -> "Instant":
        """Return the present moment."""
        return cls(machine(), time.perf_counter(), time.time())

    def on_this_clock(self) -> float:
        """Return the moment in seconds of this process's ``time.perf_counter``."""
        here = Instant.now()
        return self.seconds if here.machine == self.machine != "" else here.seconds - (here.wall - self.wall)


def write_part(
    log: ActivityLog, world: World, run_dir: Path, stages: Sequence[int], *, origin: Instant
) -> list[dict[str, Any]]:
    """Write the events of this process's ``stages``; ``origin``: the zero of the trace's time, taken on rank 0.

    Return for each stage its part, how many events it has there and how many were left out; or why there is none
    (``failed``), because the run is worth more than its trace.
    """
    part = run_dir / PARTS / f"rank{world.rank}.jsonl"
    began = origin.on_this_clock()
    try:
        part.parent.mkdir(exist_ok=True)
        with part.open("w") as file:
            for k in stages:
                file.writelines(json.dumps(line) + "\n" for line in _lines(log, world, k, began))
    except OSError as error:
        return [{"stage": k, "failed": f"rank {world.rank}: {error}"} for k in stages]
    return [
        {
            "stage": k,
            "part": part.name,
            "events": len(log.events[k]),
            "events_left_out": log.num_left_out[k],
            "seconds_to_rank_0": origin.seconds - began,
        }
        for k in stages
    ]


def merge_parts(run_dir: Path, results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Make one file of the parts, whole or not at all, and return it; on rank 0, when all are written.

    ``results`` are what :func:`write_part` returned for all stages; ``about`` the run is written to ``otherData``.

    Raises:
        OSError: the file could not be written, or a part.
    """
    parts = run_dir / PARTS
    try:
        if failed := [result["failed"] for result in results if "failed" in result]:
            raise OSError("; ".join(dict.fromkeys(failed)))
        stages = [{name: value for name, value in result.items() if name != "part"} for result in results]
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {**about, "stages": stages}})
        names = dict.fromkeys(parts / result["part"] for result in results)
        with (parts / TRACE).open("w") as file, fileinput.FileInput(names) as lines:
            file.write(head.removesuffix("}") + ', "traceEvents": [\n')
            file.write(next(lines).rstrip("\n"))
            file.writelines(",\n" + line.rstrip("\n") for line in lines)
            file.write("\n]}\n")
        os.replace(parts / TRACE, run_dir / TRACE)
        return run_dir / TRACE
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _lines(log: ActivityLog, world: World, k: int, origin: float) -> Iterator[dict[str, Any]]:
    """Yield the names of stage ``k``, then its events."""
    for name, value in (
        ("process_name", {"name": f"stage {k}"}),
        ("process_sort_index", {"sort_index": k}),
        ("thread_name", {"name": f"rank {world.rank}, {world.device}"}),
    ):
        yield {"ph": "M", "pid": k, "tid": 0, "name": name, "args": value}
    for event in log.events[k]:
        # Whole nanoseconds first: rounded one by one, neighbours could overlap.
        begin, end = (round((at - origin) * 1e9) for at in (event.begin, event.end))
        (op, number), segment = event.action, event.segment.segment
        share, kind = KINDS[op]
        groups = dict.fromkeys((Op.UPDATE, Op.UPDATE_HEAD, Op.UPDATE_TIED), "group")
        counted = {**groups, Op.WEIGHTS: "updates_in_segment"}.get(op, "micro_batch")
        arguments: dict[str, Any] = {counted: number, "action": str(event.action), "version": event.version}
        if op is Op.UPDATE:
            arguments["update"] = segment.first_update + number
        if event.forward_version is not None:
            arguments["forward_version"] = event.forward_version
        arguments |= {"epoch": segment.epoch} if event.segment.training else {"evaluation": True}
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        yield {"ph": "X", "pid": k, "tid": 0, "name": f"{kind} {number}", "cat": share, **times, "args": arguments}
