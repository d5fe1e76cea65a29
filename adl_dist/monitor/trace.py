"""``run_dir/trace.json``: the events of all stages.

Each rank writes the events of its stages into a file of its own; rank 0 then makes one of them and removes the parts.
The form is Chrome's "JSON Object Format", for https://ui.perfetto.dev or chrome://tracing: complete events, one process
for each stage, times in microseconds.
"""

import fileinput
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adl_dist.distributed.world import World
from adl_dist.monitor.activity import KINDS, ActivityLog, wall_offset
from adl_dist.schedule import Op

TRACE = "trace.json"
PARTS = "trace"  # a folder, while the file is made
MOST_EVENTS = 200_000  # the first ones of each stage are kept: about 30 MB of memory, and as much on disk


def write_part(
    log: ActivityLog, world: World, run_dir: Path, stages: Sequence[int], *, origin: float
) -> list[dict[str, Any]]:
    """Write the events of this process's ``stages``.

    Args:
        log: the record of this process.
        world: the processes.
        run_dir: the run folder.
        stages: the stages of this process.
        origin: zero of the trace's time, in seconds of ``time.time``, which NTP keeps equal on all machines.

    Returns:
        For each stage the name of its part and the numbers of events there and left out, or why it ``failed``: the run
        is worth more than its trace.
    """
    part = run_dir / PARTS / f"rank{world.rank}.jsonl"
    began = origin - wall_offset()
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
        }
        for k in stages
    ]


def merge_parts(run_dir: Path, results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Join the parts to one file, whole or not at all; on rank 0.

    Args:
        run_dir: the run folder.
        results: the results of :func:`write_part` for all stages.
        about: facts about the run for ``otherData``.

    Raises:
        OSError: If the file or a part could not be written.
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
