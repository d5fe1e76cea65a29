"""``adl-dist bench``: our methods and torch's own ways to train, side by side on this machine, in one table."""

import argparse
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

import adl_dist
from adl_dist.checkpoint.run_dir import make_folder
from adl_dist.cli.arguments import Parser
from adl_dist.cli.bench.entries import DEFAULT, Entry, Host, entries, known_names
from adl_dist.cli.bench.report import draw, facts_of, report, rows
from adl_dist.cli.bench.runner import BenchConfig, Measured, RankPlacement, as_json, measure_once
from adl_dist.cli.bench.survey import survey
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import ConfigError

FACTS, FIGURE, LOGS = "bench.json", "bench.svg", "logs"
FEWEST = 5  # measured updates of a run
OF_THE_PILOT = 4  # updates, of which the first does not count
SECONDS_TO_START = 300.0  # of a run, at most
DAY = 86400.0
TIMES_TOO_LONG = 10  # a run that takes so many times as long as it should is given up


def bench(words: list[str]) -> None:
    """Read the flags and do as they say."""
    flags = _flags(words)
    _check(flags)
    config, _ = compose_run([*flags.overrides, "hydra.mode=RUN"])
    _check_precision(config)
    instantiate.check_targets(config)
    check_device(config.runtime.device.value)
    place = Host(
        threads=config.threads,
        num_cores=num_cores(),
        num_gpus=torch.cuda.device_count() if config.runtime.device is Device.cuda else 0,
        warmup=flags.warmup,
    )
    fit, left_out = entries(flags.contenders.split(","), config, place)
    if not fit:
        raise ConfigError(f"no contender is left: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    out = _folder(flags.out, config)
    setting = BenchConfig(
        config=config,
        overrides=flags.overrides,
        survey=survey(config, flags.overrides, threads=place.threads),
        placing=_placing(flags, config),
        log_folder=out / LOGS,
        timeout_seconds=flags.timeout or (DAY if flags.updates else SECONDS_TO_START + TIMES_TOO_LONG * flags.seconds),
    )
    make_folder(out)
    signal.signal(signal.SIGTERM, _interrupted)  # no run may outlive this process
    code, runs = 0, list[Measured]()

    def facts() -> dict[str, Any]:
        table = rows(fit, runs, setting.survey.traffic)
        return {
            "command": shlex.join(["adl-dist", "bench", *words]),
            **_circumstances(config, setting, place),
            "order": [contender.name for contender in fit],
            "runs": [as_json(run) for run in runs],
            "table": [facts_of(row, table) for row in table],
            "left_out": left_out,
        }

    try:
        _measure(fit, setting, flags, runs, lambda: _write(out / FACTS, facts()))
    except KeyboardInterrupt:
        sys.stderr.write("\nadl-dist: interrupted; the table shows what was measured until then\n")
        code = 130
    _write(out / FACTS, facts())
    table = rows(fit, runs, setting.survey.traffic)
    title = f"{config.model['_target_'].rpartition('.')[2]}, K = {config.partition.num_stages}"
    draw(out / FIGURE, table, title=title)
    _say(_head(config, setting, place))
    _say(report(table, left_out, is_gpu=config.runtime.device is Device.cuda))
    written = [str(path) for path in (out / FACTS, out / FIGURE) if path.is_file()]
    _say(f"\nwritten: {', '.join(written)}; what each run said: {out / LOGS}")
    raise SystemExit(code or (1 if all(row.error for row in table) else 0))


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _measure(
    fit: Sequence[Entry], setting: BenchConfig, flags: argparse.Namespace, runs: list[Measured], save: Any
) -> None:
    """Run all contenders in turn, and again; one that has failed does not run again."""
    guess = math.nan if flags.updates else _pilot(setting, fit)
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for repetition in range(flags.repetitions):
        for contender in fit:
            if contender.name in failed:
                continue
            expected = seconds.get(contender.name, guess * contender.samples)
            wanted = flags.updates or _num_updates(flags.seconds, expected)
            run = measure_once(contender, setting, repetition=repetition, num_updates=contender.warmup + wanted)
            runs.append(run)
            seconds[contender.name] = run.seconds_per_update
            if run.error is not None:
                failed.add(contender.name)
            told = f"{run.images_per_second:,.1f} images/s" if run.error is None else f"failed: {run.error}"
            sys.stderr.write(f"{repetition + 1}/{flags.repetitions}  {contender.name}: {told}\n")
            save()


def _num_updates(seconds: float, of_one: float) -> int:
    """How many updates take about ``seconds``, if one takes ``of_one``; the fewest if that is not known."""
    return max(FEWEST, round(seconds / of_one)) if of_one > 0 else FEWEST


def _pilot(setting: BenchConfig, fit: Sequence[Entry]) -> float:
    """Seconds of one sample in a plain loop, roughly, for the lengths of the first runs; nan: it failed."""
    plain = Entry(
        name="pilot",
        kind="loop",
        num_processes=1,
        threads=fit[0].threads,
        micro_batches=1,
        samples=max(contender.samples for contender in fit),
        warmup=1,
    )
    run = measure_once(plain, setting, repetition=0, num_updates=OF_THE_PILOT)
    if run.error is not None:
        sys.stderr.write(f"a short plain loop, for the length of the runs, failed: {run.error}\n")
    return run.seconds_per_update / plain.samples


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist bench",
        description="Train as configured in many ways, in turn and several times, and compare their speeds.",
        epilog="example: adl-dist bench model=resnet18 data=synthetic partition.num_stages=2 partition.balance=auto",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as of adl-dist train: model, data, K, M, batch size, cut")
    add("--contenders", default=",".join(DEFAULT), metavar="NAME,NAME", help=f"of {', '.join(known_names())}")
    add("--repetitions", type=int, default=3, metavar="N", help="runs of each contender; default: 3")
    add("--seconds", type=float, default=20.0, metavar="S", help="of training in a run, about; default: 20")
    add("--updates", type=int, metavar="N", help="measured updates of a run, instead of --seconds")
    add("--warmup", type=int, default=3, metavar="N", help="updates that do not count, at least; default: 3")
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="a run that takes longer is ended, and failed; default: far more than --seconds, with --updates a day",
    )
    add("--out", type=Path, metavar="FOLDER", help="for bench.json, bench.svg and logs/; default: runs/bench-...")
    add("--no-pinning", action="store_true", help="do not bind processes to cores")
    add(
        "--prefix", default="", metavar="WORDS", help="before the command of each rank, like 'ip netns exec node{rank}'"
    )
    add("--master-addr", metavar="ADDRESS", help="of rank 0, where the others reach it; needed with --prefix")
    add("--interface", metavar="NAME", help="of the network between the ranks, with --prefix")
    return parser.parse_intermixed_args(words)


def _check(flags: argparse.Namespace) -> None:
    """Refuse what would only be found after measuring."""
    if launched_world_size() is not None:
        raise ConfigError("adl-dist bench starts its own processes; start it without torchrun")
    for name in ("repetitions", "updates", "warmup"):
        number = getattr(flags, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name} {number} must be at least 1")
    for name in ("seconds", "timeout"):
        number = getattr(flags, name)
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(f"--{name} {number} must be above 0")
    if flags.prefix and not flags.master_addr:
        raise ConfigError("--prefix places ranks apart, so they need --master-addr, where rank 0 can be reached")
    if not flags.prefix and (flags.master_addr or flags.interface):
        raise ConfigError("--master-addr and --interface are for ranks that --prefix places apart; add it")
    try:
        shlex.split(flags.prefix)
    except ValueError as error:
        raise ConfigError(f"--prefix {flags.prefix}: {error}") from None


def _check_precision(config: RunConfig) -> None:
    """Refuse what would reach our own runs only."""
    if config.runtime.autocast or config.runtime.wire_dtype or config.runtime.compile:
        raise ConfigError(
            "adl-dist bench compares all contenders in plain dtype, uncompiled, and torch's would know nothing of "
            "runtime.autocast, runtime.wire_dtype and runtime.compile; leave them away"
        )


def _folder(path: Path | None, config: RunConfig) -> Path:
    if path is None:
        path = Path("runs") / f"bench-{Path(str(config.run_dir)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (path / FACTS).exists():
        raise ConfigError(f"--out {path} already holds a {FACTS}, which would be written over; choose another folder")
    return path


def _placing(flags: argparse.Namespace, config: RunConfig) -> RankPlacement:
    # A rank that a prefix has placed may have other cores than we see.
    pinned = not flags.no_pinning and not flags.prefix and hasattr(os, "sched_getaffinity")
    return RankPlacement(
        cores=sorted(os.sched_getaffinity(0)) if pinned else None,
        prefix=shlex.split(flags.prefix),
        master_addr=flags.master_addr or "",
        interface=flags.interface,
    )


def _circumstances(config: RunConfig, setting: BenchConfig, place: Host) -> dict[str, Any]:
    chosen = config.method.chosen()
    return {
        "setting": {
            "model": config.model,
            "data": config.data,
            "num_stages": config.partition.num_stages,
            "sizes": setting.survey.sizes,
            "granularity": setting.survey.granularity,
            "accumulation_steps": chosen.micro_batches_per_update,
            "batch_size": config.train.batch_size,
            "dtype": config.dtype.value,
            "channels_last": config.runtime.channels_last,
            "device": config.runtime.device.value,
            "threads": place.threads,
            "cores": None if setting.placing.cores is None else list(setting.placing.cores),
            "prefix": list(setting.placing.prefix),
            "seed": config.seed,
        },
        "machine": {
            "processor": _processor(),
            "cores": place.num_cores,
            "gpus": [torch.cuda.get_device_name(number) for number in range(place.num_gpus)],
            "system": platform.platform(),
        },
        "versions": {
            "adl_dist": adl_dist.__version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _head(config: RunConfig, setting: BenchConfig, place: Host) -> str:
    sizes = " ".join(map(str, setting.survey.sizes))
    chosen = config.method.chosen()
    return (
        f"{config.model['_target_']}, batch {config.train.batch_size}, M = {chosen.micro_batches_per_update}, "
        f"K = {config.partition.num_stages}, units per stage {sizes} ({setting.survey.granularity} grain), "
        f"{config.dtype.value}, {config.runtime.device.value}, {place.num_cores} cores, torch {torch.__version__}\n"
    )


def _write(path: Path, facts: dict[str, Any]) -> None:
    unfinished = path.with_name(f".{path.name}.saving")
    unfinished.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    os.replace(unfinished, path)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
