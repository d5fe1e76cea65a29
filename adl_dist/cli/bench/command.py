"""``adl-dist bench``: measure our methods and torch's baselines in turn."""

import argparse
import contextlib
import json
import math
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import adl_dist
from adl_dist.checkpoint.run_dir import make_folder
from adl_dist.cli.bench.entries import (
    BASELINE,
    DEFAULT,
    NAMES,
    Entry,
    ModelSurvey,
    check_fair,
    entries,
    survey,
)
from adl_dist.cli.bench.runner import BenchConfig, Measured, measure_once
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Parser, compose_run, number
from adl_dist.cli.subprocesses import apart
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import ConfigError, Exit
from adl_dist.report.files import write_atomically
from adl_dist.report.tables import counted, text_table

FACTS, LOGS = "bench.json", "logs"
FEWEST = 5  # measured updates of a run
SECONDS_TO_START = 300.0  # the longest that a run may take to start
DAY = 86400.0
TIMES_TOO_LONG = 10  # a run that takes so many times as long as it should is ended
# Of the table: heads, and for all but the first four the value of a row, which is unknown if its key is missing.
HEAD = {"contender": "contender", "K": "num_processes", "M": "accumulation_steps", "threads": "threads"}
CELLS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "images/s": ("median", "{:,.1f}".format),
    "least .. most": ("range", lambda ends: "{:,.1f} .. {:,.1f}".format(*ends)),
    "ratio": ("ratio_to_baseline", "{:.2f}".format),
    "predicted": ("predicted_images_per_second", "{:,.1f}".format),
    "measured/predicted": ("measured_to_predicted", "{:.2f}".format),
    "peak memory (MiB)": ("peak_memory_bytes", lambda sizes: " ".join(f"{each / 2**20:,.0f}" for each in sizes)),
    "busy": ("busy_share", lambda shares: " ".join(f"{share:.0%}" for share in shares)),
    "kB/image": ("bytes_per_image_computed", lambda num: f"{num / 1e3:,.1f}"),
}

Row = dict[str, Any]  # plain values, as bench.json has them; what is unknown is missing


def bench(argv: list[str]) -> None:
    """Measure all entries in turn, and write their table to a folder."""
    if launched_world_size() is not None:
        raise ConfigError("adl-dist bench starts its own processes; start it without torchrun")
    flags = _flags(argv)
    config, _ = compose_run([*flags.overrides, "hydra.mode=RUN"])
    config.runtime.threads = config.runtime.threads or default_threads(config.partition.num_stages)  # K is of processes
    check_fair(config, command="adl-dist bench")
    instantiate.check_targets(config)
    check_device(config.runtime.device)
    able, left_out = entries(flags.contenders.split(","), config, warmup=flags.warmup)
    if not able:
        raise ConfigError(f"no contender is left: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    named = config.run_dir if any(word.lstrip("+").startswith("run_dir=") for word in flags.overrides) else None
    unnamed = f"runs/bench-{Path(str(config.run_dir)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = Path(flags.out or named or unnamed).expanduser()  # bench keeps no other run folder
    if (out / FACTS).exists():
        raise ConfigError(f"{out} already holds a {FACTS}, which would be overwritten; choose another folder")
    setting = BenchConfig(
        config=config,
        overrides=flags.overrides,
        survey=apart(survey, [(config, able)])[0],
        log_folder=out / LOGS,
        timeout_seconds=DAY if flags.updates else SECONDS_TO_START + TIMES_TOO_LONG * flags.seconds,
    )
    make_folder(out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run may outlive this process
    facts = {
        "command": shlex.join(["adl-dist", "bench", *argv]),
        "config": config.plain,
        "sizes": {num: cut.sizes for num, cut in setting.survey.cuts.items()},
        "granularity": setting.survey.granularity,
        "threads": config.threads,
        **circumstances(has_gpus=config.runtime.device == "cuda"),
        "order": [entry.name for entry in able],
        "left_out": left_out,
    }
    code, runs, table = 0, list[Measured](), list[Row]()
    try:
        for run in measure_all(able, setting, flags):
            runs.append(run)
            table = rows(able, runs, setting.survey)
            content = {**facts, "runs": [run.as_json() for run in runs], "table": table}
            with write_atomically(out / FACTS) as unfinished:
                unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n")
    except KeyboardInterrupt:
        sys.stderr.write("\nadl-dist: interrupted; the table shows what was measured until then\n")
        code = 130
    written = f"written: {out / FACTS}; " if runs else ""
    sys.stdout.write(f"{_head(setting)}\n\n{report(table, left_out)}\n\n")
    sys.stdout.write(f"{written}output of each run: {out / LOGS}\n")
    raise Exit(code or (1 if all("error" in row for row in table) else 0))


def measure_all(able: Sequence[Entry], setting: BenchConfig, flags: argparse.Namespace) -> Iterator[Measured]:
    """Yield runs of all entries in turn; drop an entry once it has failed.

    The length of a run follows from the speed of the entry's previous run, at first from its prediction.
    """
    predicted = setting.survey.predicted
    seconds = {entry.name: entry.samples / predicted.get(entry.name, math.nan) for entry in able}
    running = list(able)
    for repetition in range(flags.repetitions):
        for entry in list(running):
            pace = seconds[entry.name]  # nan: unknown
            num_updates = flags.updates or max(FEWEST, round(flags.seconds / pace) if pace > 0 else FEWEST)
            run = measure_once(entry, setting, repetition=repetition, num_updates=entry.warmup + num_updates)
            seconds[entry.name] = run.seconds_per_update
            result = f"{run.images_per_second:,.1f} images/s" if run.error is None else f"failed: {run.error}"
            sys.stderr.write(f"{repetition + 1}/{flags.repetitions}  {entry.name}: {result}\n")
            if run.error is not None:
                running.remove(entry)
            yield run


def _flags(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist bench",
        description="Train as configured in many ways, in turn and several times, and compare their speeds.",
        epilog="example: adl-dist bench model=resnet18 data=synthetic partition.num_stages=2 partition.balance=auto",
        overrides="as for adl-dist train: model, data, K, M, batch size, cut",
    )
    add, whole, seconds = parser.add_argument, number(int, 1), number(float, 0.001)
    add("--contenders", default=",".join(DEFAULT), metavar="NAME,NAME", help=f"among {', '.join(NAMES)}")
    add("--repetitions", type=whole, default=3, metavar="N", help="runs of each contender; default: 3")
    add("--seconds", type=seconds, default=20.0, metavar="S", help="training time of a run, about; default: 20")
    add("--updates", type=whole, metavar="N", help="measured updates of a run, instead of --seconds")
    add("--warmup", type=whole, default=3, metavar="N", help="updates that do not count, at least; default: 3")
    out = "for bench.json and logs/; default: run_dir=, else runs/bench-..."
    add("--out", type=Path, metavar="FOLDER", help=out)
    return parser.parse_intermixed_args(argv)


def circumstances(*, has_gpus: bool) -> dict[str, Any]:
    """Return the machine and the software versions of a measurement."""
    gpus = range(torch.cuda.device_count() if has_gpus else 0)
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    versions = {"adl_dist": adl_dist.__version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    return {
        "machine": {
            "processor": processor,
            "cores": num_cores(),
            "gpus": list(map(torch.cuda.get_device_name, gpus)),
            "system": platform.platform(),
        },
        "versions": {**versions, "python": platform.python_version()},
    }


def _head(setting: BenchConfig) -> str:
    config, model, M = setting.config, setting.survey, setting.config.method.micro_batches_per_update
    units = "; ".join(" ".join(map(str, cut.sizes)) for cut in model.cuts.values())
    return (
        f"{config.model['_target_']}, batch {config.train.batch_size}, M = {M}, K = {config.partition.num_stages}, "
        f"units per stage {units} ({model.granularity}), {config.dtype}, {config.runtime.device}, {num_cores()} cores, "
        f"torch {torch.__version__}"
    )


def rows(able: Sequence[Entry], runs: Sequence[Measured], survey: ModelSurvey) -> list[Row]:
    """Return the table: one row per entry, with its ratio to the baseline."""
    table = [_row(entry, [run for run in runs if run.contender == entry.name], survey) for entry in able]
    reference = baseline(table)
    for row in table:
        if reference is not None and "median" in row:
            row["ratio_to_baseline"] = row["median"] / reference["median"]
    return table


def _row(entry: Entry, runs: Sequence[Measured], survey: ModelSurvey) -> Row:
    done = [run for run in runs if run.error is None]
    speeds, shares = [run.images_per_second for run in done], [run.busy_share for run in done if run.busy_share]
    predicted = survey.predicted.get(entry.name)
    row = {
        "contender": entry.name,
        "num_processes": entry.num_processes,
        "accumulation_steps": entry.method.micro_batches_per_update,
        "threads": entry.threads,
        "samples_per_update": entry.samples,
        "warmup_updates": entry.warmup,
        "method": entry.method.settings if entry.kind == "ours" else None,
        "images_per_second": speeds,
        "bytes_per_image_computed": survey.bytes_per_image(entry),
        "predicted_images_per_second": predicted,
        "busy_share": [statistics.median(stage) for stage in zip(*shares, strict=True)] or None,
        "error": next((run.error for run in runs if run.error is not None), None),
    }
    if speeds:
        median = statistics.median(speeds)
        row |= {"median": median, "least": min(speeds), "most": max(speeds)}
        row["measured_to_predicted"] = median / predicted if predicted else None
        row["peak_memory_bytes"] = [max(each) for each in zip(*(run.peak_memory_bytes for run in done), strict=True)]
    return {name: value for name, value in row.items() if value is not None}


def baseline(table: Sequence[Row]) -> Row | None:
    """Return the row of the faster backpropagation baseline, or None."""
    known = [row for row in table if row["contender"] in BASELINE and "median" in row]
    return max(known, key=lambda row: row["median"], default=None)


def report(table: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """Return the table as text; docs/bench.md explains its columns."""
    shown: list[list[object]] = [[*HEAD, *CELLS]]
    for row in table:
        cells = ["failed" if "error" in row else "not run", *[""] * (len(CELLS) - 1)]
        if "median" in row:
            known = {**row, "range": (row["least"], row["most"])}
            cells = [form(known[name]) if name in known else "-" for name, form in CELLS.values()]
        shown.append([*(row[name] for name in HEAD.values()), *cells])
    lines, reference = [*text_table(shown), ""], baseline(table)
    if reference is None:
        lines.append(f"ratio: there is none, for neither {' nor '.join(BASELINE)} was measured")
    else:
        threads = counted(reference["threads"], "thread")
        lines.append(
            f"ratio: of medians, to {reference['contender']}, the faster of {' and '.join(BASELINE)} as far as both "
            f"were measured: one process, {threads}"
        )
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    lines += [f"failed: {row['contender']}: {row['error']}" for row in table if "error" in row]
    return "\n".join(lines)
