"""``adl-dist bench``: measure our methods and torch's baselines in turn."""

import argparse
import contextlib
import json
import math
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import adl_dist
from adl_dist.checkpoint.run_dir import make_folder
from adl_dist.cli.bench.entries import DEFAULT, NAMES, Entry, check_fair, entries, survey
from adl_dist.cli.bench.report import Row, draw, report, rows
from adl_dist.cli.bench.runner import BenchConfig, Measured, measure_once
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Parser, compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import apart
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import ConfigError, Exit
from adl_dist.report.files import write_atomically

FACTS, FIGURE, LOGS = "bench.json", "bench.svg", "logs"
FEWEST = 5  # measured updates of a run
SECONDS_TO_START = 300.0  # the longest that a run may take to start
DAY = 86400.0
TIMES_TOO_LONG = 10  # a run that takes so many times as long as it should is ended


def bench(argv: list[str]) -> None:
    """Measure all entries in turn, and write their table to a folder."""
    flags = _flags(argv)
    config, _ = compose_run([*flags.overrides, "hydra.mode=RUN"])
    config.runtime.threads = config.runtime.threads or default_threads(config.partition.num_stages)  # K is of processes
    _check(flags, config)
    instantiate.check_targets(config)
    check_device(config.runtime.device)
    able, left_out = entries(flags.contenders.split(","), config, warmup=flags.warmup)
    if not able:
        raise ConfigError(f"no contender is left: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    is_named = any(word.lstrip("+").startswith("run_dir=") for word in flags.overrides)
    out = flags.out or (Path(str(config.run_dir)) if is_named else None)  # bench keeps no other run folder
    out = out or Path("runs") / f"bench-{Path(str(config.run_dir)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / FACTS).exists():
        raise ConfigError(f"{out} already holds a {FACTS}, which would be overwritten; choose another folder")
    setting = BenchConfig(
        config=config,
        overrides=flags.overrides,
        survey=apart(survey, [(config, able)])[0],
        log_folder=out / LOGS,
        timeout_seconds=flags.timeout or (DAY if flags.updates else SECONDS_TO_START + TIMES_TOO_LONG * flags.seconds),
        pinned=not flags.no_pinning,
    )
    make_folder(out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run may outlive this process
    facts = {"command": shlex.join(["adl-dist", "bench", *argv]), **_made_with(setting)}
    facts |= {"order": [entry.name for entry in able], "left_out": left_out}
    code, runs, table = 0, list[Measured](), list[Row]()
    try:
        for run in measure_all(able, setting, flags):
            runs.append(run)
            table = rows(able, runs, setting.survey)
            _write(out / FACTS, facts, runs, table)
    except KeyboardInterrupt:
        sys.stderr.write("\nadl-dist: interrupted; the table shows what was measured until then\n")
        code = 130
    draw(out / FIGURE, table, title=f"{config.model['_target_'].rpartition('.')[2]}, K = {config.partition.num_stages}")
    written = ", ".join(str(path) for path in (out / FACTS, out / FIGURE) if path.is_file())
    sys.stdout.write(f"{_head(setting)}\n\n{report(table, left_out)}\n\n")
    sys.stdout.write(f"written: {written}; output of each run: {out / LOGS}\n")
    raise Exit(code or (1 if all("error" in row for row in table) else 0))


def _write(path: Path, facts: dict[str, Any], runs: Sequence[Measured], table: list[Row]) -> None:
    with write_atomically(path) as unfinished:
        text = json.dumps({**facts, "runs": [run.as_json() for run in runs], "table": table}, indent=1, default=str)
        unfinished.write_text(text + "\n")


def measure_all(able: Sequence[Entry], setting: BenchConfig, flags: argparse.Namespace) -> Iterator[Measured]:
    """Yield runs of all entries in turn; run no entry again that has failed.

    The length of a run follows from the speed of the previous one, that of the first from the predictions.
    """
    predicted = setting.survey.predicted
    guess = min(predicted.values(), default=math.nan)
    seconds = {entry.name: entry.samples / predicted.get(entry.name, guess) for entry in able}
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
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as for adl-dist train: model, data, K, M, batch size, cut")
    add("--contenders", default=",".join(DEFAULT), metavar="NAME,NAME", help=f"among {', '.join(NAMES)}")
    add("--repetitions", type=int, default=3, metavar="N", help="runs of each contender; default: 3")
    add("--seconds", type=float, default=20.0, metavar="S", help="training time of a run, about; default: 20")
    add("--updates", type=int, metavar="N", help="measured updates of a run, instead of --seconds")
    add("--warmup", type=int, default=3, metavar="N", help="updates that do not count, at least; default: 3")
    wait = "a run that takes longer is ended and has failed; default: far more than --seconds, with --updates a day"
    add("--timeout", type=float, metavar="S", help=wait)
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for bench.json, bench.svg, logs/; default: run_dir=, else runs/bench-...",
    )
    add("--no-pinning", action="store_true", help="do not bind processes to cores")
    return parser.parse_intermixed_args(argv)


def _check(flags: argparse.Namespace, config: RunConfig) -> None:
    """Check flags and settings before anything is measured."""
    if launched_world_size() is not None:
        raise ConfigError("adl-dist bench starts its own processes; start it without torchrun")
    for name in ("repetitions", "updates", "warmup", "seconds", "timeout"):
        if (number := getattr(flags, name)) is not None and not 0 < number < math.inf:
            raise ConfigError(f"--{name} {number} must be above 0")
    check_fair(config, command="adl-dist bench")


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


def _made_with(setting: BenchConfig) -> dict[str, Any]:
    return {
        "config": setting.config.plain,
        "sizes": {num: cut.sizes for num, cut in setting.survey.cuts.items()},
        "granularity": setting.survey.granularity,
        "threads": setting.config.threads,
        "pinned": setting.pinned,
        **circumstances(has_gpus=setting.config.runtime.device == "cuda"),
    }


def _head(setting: BenchConfig) -> str:
    config, model = setting.config, setting.survey
    units = "; ".join(" ".join(map(str, cut.sizes)) for cut in model.cuts.values())
    return (
        f"{config.model['_target_']}, batch {config.train.batch_size}, "
        f"M = {config.method.micro_batches_per_update}, K = {config.partition.num_stages}, "
        f"units per stage {units} ({model.granularity}), {config.dtype}, "
        f"{config.runtime.device}, {num_cores()} cores, torch {torch.__version__}"
    )
