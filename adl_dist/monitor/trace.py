"""``run_dir/trace.json``: the events of all stages.

Each rank sends the events of its stages, compressed, to rank 0, which writes the file. The form is Chrome's "JSON
Object Format", for https://ui.perfetto.dev or chrome://tracing: complete events, one process for each stage, times in
microseconds.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adl_dist.distributed.world import World
from adl_dist.monitor.activity import KINDS, ActivityLog, wall_offset
from adl_dist.report.files import write_atomically
from adl_dist.schedule import Op

TRACE = "trace.json"
MOST_EVENTS = 200_000  # the first ones of each stage are kept: about 30 MB of memory, and as much on disk


def parts_of(log: ActivityLog, world: World, stages: Sequence[int], *, origin: float) -> list[dict[str, Any]]:
    """Return, for each stage, its compressed events and their number.

    ``origin`` is the trace's time 0, in seconds of ``time.time``, which NTP keeps equal on all machines.
    """
    zero = origin - wall_offset()
    return [
        {
            "stage": k,
            "events": len(log.events[k]),
            "events_left_out": log.num_left_out[k],
            "lines": zlib.compress(",\n".join(json.dumps(line) for line in _lines(log, world, k, zero)).encode(), 1),
        }
        for k in stages
    ]


def write_trace(run_dir: Path, parts: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Write all stages' parts and facts ``about`` the run; return the path."""
    stages = [{name: value for name, value in part.items() if name != "lines"} for part in parts]
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {**about, "stages": stages}})
    with write_atomically(run_dir / TRACE) as unfinished, unfinished.open("wb") as file:
        file.write(f'{head.removesuffix("}")}, "traceEvents": [\n'.encode())
        for number, part in enumerate(parts):
            file.write(b",\n" * (number > 0) + zlib.decompress(part["lines"]))
        file.write(b"\n]}\n")
    return run_dir / TRACE


def _lines(log: ActivityLog, world: World, k: int, origin: float) -> Iterator[dict[str, Any]]:
    """Yield the entries that name stage ``k``, then one for each event."""
    for name, value in (
        ("process_name", {"name": f"stage {k}"}),
        ("process_sort_index", {"sort_index": k}),
        ("thread_name", {"name": f"rank {world.rank}, {world.device}"}),
    ):
        yield {"ph": "M", "pid": k, "tid": 0, "name": name, "args": value}
    for event in log.events[k]:
        # Whole nanoseconds first: rounded one by one, neighbours could overlap.
        begin, end = (round((at - origin) * 1e9) for at in (event.begin, event.end))
        (op, number, *_), segment = event.action, event.segment.segment
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
