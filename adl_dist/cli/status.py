"""``adl-dist status``, ``checkpoint`` and ``stop``: job control. No torch."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adl_dist.checkpoint import layout
from adl_dist.cli.run_folder import named_folder
from adl_dist.control.requests import RequestKind
from adl_dist.control.run_socket import SOCKET, ask_run
from adl_dist.errors import ConfigError
from adl_dist.report import final_table
from adl_dist.report.runs import read_json
from adl_dist.report.tables import text_table

HEAD = ("stage", "host:pid", "epoch", "update", "micro-batch", "images/s", "busy", "staleness", "memory", "now")


def status(arguments: list[str]) -> None:
    """Run ``adl-dist status``: print the state of a run, or its summary."""
    as_json = "--json" in arguments
    run_dir = _local("status", [each for each in arguments if each != "--json"])
    if summary := _summary_of_ended(run_dir):
        stopped = summary.get("stopped", {})
        how = f"was stopped by {stopped['why']}, and the same command resumes it" if stopped else "ended like this"
        head = f"no run is training in {run_dir}; the last one there {how}:"
        sys.stdout.write((json.dumps({"ended": summary}) if as_json else f"{head}\n{final_table(summary)}") + "\n")
        return
    answer = ask_run(run_dir, "status")
    sys.stdout.write((json.dumps(answer) if as_json else table(answer)) + "\n")


def checkpoint(arguments: list[str]) -> None:
    """Run ``adl-dist checkpoint RUN_DIR``: save now, and continue."""
    sys.stdout.write(f"{ask_run(_local('checkpoint', arguments), RequestKind.CHECKPOINT.value)['done']}\n")


def stop(arguments: list[str]) -> None:
    """Run ``adl-dist stop RUN_DIR``: save now, and end."""
    sys.stdout.write(f"{ask_run(_local('stop', arguments), RequestKind.STOP.value)['done']}\n")


def table(answer: Mapping[str, Any]) -> str:
    """Format the answer to ``status``, one line per stage."""
    rows: list[Sequence[object]] = [HEAD]
    for stage in answer["stages"]:
        now = f"{stage['doing']} since {stage['seconds']:.1f} s"
        if stage["saving"]:
            now += f"; {stage['saving']} a checkpoint"
        if stage["silent_seconds"]:
            now = f"no answer since {stage['silent_seconds']:.1f} s; before: {now}"
        staleness = "-" if stage["staleness_mean"] is None else f"{stage['staleness_mean']:.2f}"
        micro_batch = "-" if stage["micro_batch"] is None else stage["micro_batch"]
        where = stage["stage"], f"{stage['host']}:{stage['pid']}", stage["epoch"] + 1, stage["update"], micro_batch
        speed, memory = f"{stage['images_per_second']:,.0f}", f"{stage['memory_bytes'] / 2**20:,.0f} MiB"
        rows.append((*where, speed, f"{stage['busy_share']:.0%}", staleness, memory, now))
    return "\n".join([*text_table(rows), f"coordinator  {answer['coordinator']}"])


def _local(command: str, arguments: Sequence[str]) -> Path:
    run_dir, _, _ = named_folder(command, arguments)
    if not isinstance(run_dir, Path):
        raise ConfigError(
            f"{run_dir}: adl-dist {command} reaches a run through a socket; give the working folder of its rank 0, "
            f"{tempfile.gettempdir()}/adl-dist-run-..., on the machine of that"
        )
    return run_dir


def _summary_of_ended(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that has ended normally, or {}."""
    summary = read_json(run_dir / "summary.json")
    saved = layout.complete(run_dir / "checkpoints")
    is_newest = bool(saved) and saved[-1] == layout.place(run_dir / "checkpoints", summary.get("updates", 0))
    return summary if is_newest and not (run_dir / SOCKET).exists() else {}
