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


def status(words: list[str]) -> None:
    """Run ``adl-dist status RUN_DIR [--json]``: print what each stage does."""
    as_json = "--json" in words
    answer = ask_run(_run_dir("status", [word for word in words if word != "--json"], more=" [--json]"), "status")
    _say(json.dumps(answer) if as_json else table(answer))


def checkpoint(words: list[str]) -> None:
    """Run ``adl-dist checkpoint RUN_DIR``: save now, and continue."""
    _say(str(ask_run(_run_dir("checkpoint", words), Ask.CHECKPOINT.value)["done"]))


def stop(words: list[str]) -> None:
    """Run ``adl-dist stop RUN_DIR``: save now, and end."""
    _say(str(ask_run(_run_dir("stop", words), Ask.STOP.value)["done"]))


def table(answer: Mapping[str, Any]) -> str:
    """Format the answer to ``status``, one line per stage."""
    rows = [HEAD, *(_row(stage) for stage in answer["stages"])]
    return "\n".join([*text_table(rows), f"coordinator  {answer['coordinator']}"])


def _row(stage: Mapping[str, Any]) -> Sequence[str]:
    now = f"{stage['doing']} since {stage['seconds']:.1f} s"
    if stage["saving"]:
        now += f"; {stage['saving']} a checkpoint"
    if stage["silent_seconds"]:
        now = f"no answer since {stage['silent_seconds']:.1f} s; before: {now}"
    staleness, micro_batch = stage["staleness_mean"], stage["micro_batch"]
    return (
        str(stage["stage"]),
        f"{stage['host']}:{stage['pid']}",
        str(stage["epoch"] + 1),
        str(stage["update"]),
        "-" if micro_batch is None else str(micro_batch),
        f"{stage['images_per_second']:,.0f}",
        f"{stage['busy_share']:.0%}",
        "-" if staleness is None else f"{staleness:.2f}",
        f"{stage['memory_bytes'] / 2**20:,.0f} MiB",
        now,
    )


def _run_dir(command: str, words: Sequence[str], *, more: str = "") -> Path:
    if len(words) != 1 or words[0].startswith("-") or not words[0].removeprefix("run_dir="):
        given = f"got '{' '.join(words)}'" if words else "got none"
        raise ConfigError(
            f"adl-dist {command} takes the folder of a running job, {given}: adl-dist {command} RUN_DIR{more}"
        )
    return Path(words[0].removeprefix("run_dir="))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
