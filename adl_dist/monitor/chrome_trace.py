"""``run_dir/trace.json``: what all stages did and when, for https://ui.perfetto.dev or chrome://tracing.

Each rank writes the events of its stages into a file of its own; rank 0 then makes one of them and removes the parts.
The form is Chrome's "JSON Object Format": complete events, one process for each stage, times in microseconds.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adl_dist.monitor.trace import KINDS, Event, SegmentTrace, Tracer
from adl_dist.schedule import Op

TRACE = "trace.json"
PARTS = "trace"  # a folder, while the file is made


def write_part(tracer: Tracer, run_dir: Path, stages: Sequence[int], *, origin: float) -> list[dict[str, Any]]:
    """Write this process's events.

    Args:
        tracer: that recorded them.
        run_dir: of the run.
        stages: of this process.
        origin: when time began, on the clock of rank 0.

    Returns:
        For each stage its part, how many events it has there and how many were left out; or why there is none
        (``failed``), because the run is worth more than its trace.
    """
    part = run_dir / PARTS / f"rank{tracer.world.rank}.jsonl"
    try:
        _write_events(part, tracer, stages, origin)
    except OSError as error:
        return [{"stage": k, "failed": f"rank {tracer.world.rank}: {error}"} for k in stages]
    shift = tracer.stretches[-1].shift if tracer.stretches else 0.0
    return [
        {
            "stage": k,
            "part": part.name,
            "events": tracer.num_kept[k],
            "events_left_out": tracer.num_left_out[k],
            "seconds_to_rank_0": shift,
        }
        for k in stages
    ]


def _write_events(part: Path, tracer: Tracer, stages: Sequence[int], origin: float) -> None:
    part.parent.mkdir(exist_ok=True)
    device = f"rank {tracer.world.rank}, {tracer.world.device}"
    with part.open("w") as file:
        for k in stages:
            for name, arguments in (
                ("process_name", {"name": f"stage {k}"}),
                ("process_sort_index", {"sort_index": k}),
                ("thread_name", {"name": device}),
            ):
                file.write(json.dumps({"ph": "M", "pid": k, "tid": 0, "name": name, "args": arguments}) + "\n")
            for stretch in tracer.stretches:
                file.writelines(json.dumps(told) + "\n" for told in _told(stretch, k, origin))


def merge_parts(run_dir: Path, results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Make one file of the parts, whole or not at all; on rank 0, when all are written.

    Args:
        run_dir: of the run.
        results: what :func:`write_part` returned, of all stages.
        about: the run, for the file's ``otherData``.

    Returns:
        The file.

    Raises:
        OSError: it could not be written, or a part.
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


def _told(stretch: SegmentTrace, stage: int, origin: float) -> Iterator[dict[str, Any]]:
    for event in stretch.events[stage]:
        # Whole nanoseconds first: rounded one by one, neighbours could overlap.
        begin, end = (round((at + stretch.shift - origin) * 1e9) for at in (event.begin, event.end))
        counts_as, name = KINDS[event.op]
        yield {
            "ph": "X",
            "pid": stage,
            "tid": 0,
            "name": f"{name} {event.number}",
            "cat": counts_as,
            "ts": begin / 1000,
            "dur": (end - begin) / 1000,
            "args": _arguments(stretch, event),
        }


def _arguments(stretch: SegmentTrace, event: Event) -> dict[str, Any]:
    match event.op:
        case Op.UPDATE:
            told: dict[str, Any] = {"group": event.number, "update": stretch.segment.first_update + event.number}
        case Op.WEIGHTS:
            told = {"updates_in_segment": event.number}
        case _:
            told = {"micro_batch": event.number}
    told |= {"action": f"{event.op.value}{event.number}", "version": event.version}
    if event.forward_version is not None:
        told["forward_version"] = event.forward_version
    return told | ({"epoch": stretch.segment.epoch} if stretch.training else {"evaluation": True})
