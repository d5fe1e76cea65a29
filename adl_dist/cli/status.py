"""``adl-dist status``, ``checkpoint`` and ``stop``: requests to a running job from outside. No torch."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adl_dist.control.requests import Ask
from adl_dist.control.run_socket import ask_run
from adl_dist.errors import ConfigError
from adl_dist.report.tables import text_table

HEAD = ("stage", "host:pid", "epoch", "update", "micro-batch", "images/s", "busy", "staleness", "memory", "now")


def status(arguments: list[str]) -> None:
    """Run ``adl-dist status RUN_DIR [--json]``: print what each stage does."""
    as_json = "--json" in arguments
    answer = ask_run(_run_dir("status", [each for each in arguments if each != "--json"], more=" [--json]"), "status")
    sys.stdout.write((json.dumps(answer) if as_json else table(answer)) + "\n")


def checkpoint(arguments: list[str]) -> None:
    """Run ``adl-dist checkpoint RUN_DIR``: save now, and continue."""
    sys.stdout.write(f"{ask_run(_run_dir('checkpoint', arguments), Ask.CHECKPOINT.value)['done']}\n")


def stop(arguments: list[str]) -> None:
    """Run ``adl-dist stop RUN_DIR``: save now, and end."""
    sys.stdout.write(f"{ask_run(_run_dir('stop', arguments), Ask.STOP.value)['done']}\n")


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


def _run_dir(command: str, arguments: Sequence[str], *, more: str = "") -> Path:
    if len(arguments) == 1 and (folder := arguments[0].removeprefix("run_dir=")) and folder[0] != "-":
        return Path(folder)
    got = f"got '{' '.join(arguments)}'" if arguments else "got none"
    raise ConfigError(f"adl-dist {command} takes the folder of a running job, {got}: adl-dist {command} RUN_DIR{more}")
