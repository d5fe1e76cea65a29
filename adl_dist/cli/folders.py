"""Commands on run folders, such as compare and stop, without torch."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from adl_dist.checkpoint import layout
from adl_dist.checkpoint.storage import local_run, place_of
from adl_dist.control.requests import RequestKind
from adl_dist.control.run_socket import SOCKET, ask_run
from adl_dist.errors import ConfigError
from adl_dist.report import comparison, final_table
from adl_dist.report.page import REPORT, write_page
from adl_dist.report.recorder import METRICS
from adl_dist.report.runs import read_json
from adl_dist.report.tables import text_table

HEAD = ("stage", "host:pid", "epoch", "update", "micro-batch", "images/s", "busy", "staleness", "memory", "now")


def named_folders(
    command: str, arguments: Sequence[str], takes: Collection[str] = (), groups: Collection[str] = ()
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the run folders, options and settings among ``arguments``.

    Options are words KEY=VALUE with a key in ``takes``; settings are words like ``data.root=images`` of the ``groups``.
    Raise ConfigError for other words.
    """
    folders, options, settings = list[str](), dict[str, str](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in options:
            raise ConfigError(f"adl-dist {command} takes one {key}=, got {options[key]} and {value}")
        if equals and key in takes:
            options[key] = value
        elif equals and {name := key.lstrip("+~"), name.partition(".")[0]} & {*groups}:
            settings.append(argument)
        elif equals and key == "run_dir":
            folders.append(value)
        elif argument.startswith("-") or (equals and not Path(argument).is_dir()):
            raise ConfigError(
                f"adl-dist {command} does not know '{argument}'; adl-dist {command} --help lists its arguments"
            )
        else:
            folders.append(argument)
    return folders, options, settings


def named_folder(
    command: str, arguments: Sequence[str], takes: Collection[str] = (), groups: Collection[str] = ()
) -> tuple[PurePath, dict[str, str], list[str]]:
    """Return the one run folder, the options and the settings.

    As :func:`named_folders`; raise ConfigError unless exactly one folder is given.
    """
    folders, options, settings = named_folders(command, arguments, takes, groups)
    if len(folders) != 1 or not folders[0]:
        more = f"adl-dist {command} --help lists its arguments"
        raise ConfigError(f"adl-dist {command} takes one run folder, got '{' '.join(folders)}'; {more}")
    return place_of(folders[0]), options, settings


def _several(command: str, arguments: Sequence[str], *takes: str) -> tuple[list[Path], dict[str, str], Path]:
    """Return run folders, options, and the folder that holds all runs."""
    folders, options, _ = named_folders(command, arguments, ("out", *takes))
    if not all(folders) or not folders:
        raise ConfigError(f"adl-dist {command} takes run folders: adl-dist {command} RUNS... [out=...]")
    if "out" not in options and (urls := [folder for folder in folders if "://" in folder]):
        raise ConfigError(f"adl-dist {command} reads a copy of {urls[0]}; say where to write by out=")
    paths = [local_run(folder) for folder in folders]
    above = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    return paths, options, above


def compare(arguments: Sequence[str]) -> None:
    """Compare runs, and write to ``out=FOLDER`` or their common folder."""
    paths, options, above = _several("compare", arguments, "reference")
    folder, command = Path(options.get("out", above)), shlex.join(["adl-dist", "compare", *arguments])
    reference = local_run(options["reference"]) if "reference" in options else None
    text = comparison.compare(paths, out=folder, reference=reference, command=command)
    sys.stdout.write(f"{text}\nwritten to {folder}: comparison.md, comparison.csv, curves.svg, curves.png\n")


def report(arguments: Sequence[str]) -> None:
    """Write the page about runs to ``out=FILE``, or their common folder."""
    paths, options, above = _several("report", arguments)
    out = Path(options.get("out", above / REPORT))
    if not out.name or out.is_dir():
        raise ConfigError(f"out={out} is a folder; name the file, like out=report.html")
    below = [[path] if (path / METRICS).is_file() else comparison.folders_below([path]) for path in paths]
    write_page(list(dict.fromkeys(run for runs in below for run in runs)), out)
    sys.stdout.write(f"written: {out}; it opens in any browser\n")


def status(arguments: list[str]) -> None:
    """Run ``adl-dist status``: print the state of a run, or its summary."""
    as_json = "--json" in arguments
    run_dir = _local("status", [each for each in arguments if each != "--json"])
    summary, saved = read_json(run_dir / "summary.json"), layout.complete(run_dir / "checkpoints")
    is_newest = bool(saved) and saved[-1] == layout.place(run_dir / "checkpoints", summary.get("updates", 0))
    where, head = read_json(run_dir / "diverged.json"), f"no run is training in {run_dir}; the last one there"
    has_diverged = where.get("update", -1) >= summary.get("updates", 0)
    is_training = (run_dir / SOCKET).exists()
    if has_diverged and not is_training:
        answer = {"ended": {"diverged": where}}
        text = f"{head} diverged at update {where['update']} (epoch {where['epoch'] + 1})"
    elif summary and is_newest and not is_training:
        answer, stopped = {"ended": summary}, summary.get("stopped", {})
        how = f"was stopped by {stopped['why']}, and the same command resumes it" if stopped else "ended like this"
        text = f"{head} {how}:\n{final_table(summary)}"
    else:
        answer = ask_run(run_dir, "status")
        text = table(answer)
    sys.stdout.write(f"{json.dumps(answer) if as_json else text}\n")


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
