"""Runs one contender once, in fresh processes, and says how fast it was."""

import json
import math
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adl_dist.cli.bench.baseline_rank import Task, result_file
from adl_dist.cli.bench.entries import Entry
from adl_dist.cli.bench.measured import seconds_per_update, summary_in, training, update_ends, words_to_measure
from adl_dist.cli.bench.survey import ModelSurvey
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import Child, ChildFailed, run_together
from adl_dist.schedule import Method

INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Where ranks run.

    Attributes:
        cores: that may be used; None: ranks are not bound to any.
        prefix: words before the command of each rank, in which ``{rank}`` is its number; none: all are local.
        master_addr: of rank 0, with a prefix.
        interface: that gloo takes, with a prefix.
    """

    cores: Sequence[int] | None
    prefix: Sequence[str] = ()
    master_addr: str = ""
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What all runs have in common. ``log_folder`` takes what they say; ``timeout_seconds`` is of one run."""

    config: RunConfig
    overrides: Sequence[str]
    survey: ModelSurvey
    placing: RankPlacement
    log_folder: Path
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run has shown.

    Attributes:
        contender: its name.
        repetition: which, counted from 0.
        num_updates: of the run, the first ones among them.
        images_per_second: over all but the first ones.
        seconds_per_update: the same.
        peak_memory_bytes: of each process.
        busy_share: of each stage; None: it is not known.
        error: why there is nothing of all that; None: there is.
    """

    contender: str
    repetition: int
    num_updates: int
    images_per_second: float = math.nan
    seconds_per_update: float = math.nan
    peak_memory_bytes: Sequence[int] = ()
    busy_share: Sequence[float] | None = None
    error: str | None = None
    command: Sequence[str] = field(default=())


def measure_once(contender: Entry, setting: BenchConfig, *, repetition: int, num_updates: int) -> Measured:
    """Run ``contender`` for ``num_updates``; a failure is a result."""
    title = f"{contender.name}-{repetition}"
    bare = Measured(contender=contender.name, repetition=repetition, num_updates=num_updates)
    with tempfile.TemporaryDirectory(prefix="adl-dist-bench-") as name:
        try:
            if contender.kind == "ours":
                return _ours(contender, setting, Path(name), setting.log_folder / f"{title}.log", bare)
            return _of_torch(contender, setting, Path(name), setting.log_folder / title, bare)
        except ChildFailed as failed:
            return replace(bare, error=str(failed))


def words_of(contender: Entry, setting: BenchConfig, num_updates: int) -> list[str]:
    """Of the command line that configures ``contender``."""
    in_stages = contender.num_processes > 1 and contender.kind != "ddp"
    return words_to_measure(
        setting.config,
        [*setting.overrides, *contender.settings],
        method=contender.method or Method(name="bp", accumulation_steps=contender.micro_batches),
        num_stages=contender.num_processes,
        cut=(setting.survey.granularity, setting.survey.sizes) if in_stages else None,
        num_updates=num_updates,
        samples=contender.samples,
        threads=contender.threads,
        bind_cores=setting.placing.cores is not None,
    )


def _ours(contender: Entry, setting: BenchConfig, folder: Path, log: Path, bare: Measured) -> Measured:
    child = replace(training(words_of(contender, setting, bare.num_updates), folder), log=log)
    children = [child]
    if setting.placing.prefix:
        children = _placed(child, setting.placing, contender.num_processes)
    threads = {"OMP_NUM_THREADS": str(contender.threads)}
    children = [replace(each, environment={**each.environment, **threads}) for each in children]
    run_together(children, timeout_seconds=setting.timeout_seconds)
    summary = summary_in(folder)
    seconds = seconds_per_update(update_ends(folder), warmup=contender.warmup)
    return replace(
        bare,
        images_per_second=contender.samples / seconds,
        seconds_per_update=seconds,
        peak_memory_bytes=[stage["peak_memory_bytes"] for stage in summary["stages"]],
        busy_share=[stage["busy_share"] for stage in summary["stages"]],
        command=child.command,
    )


def _of_torch(contender: Entry, setting: BenchConfig, folder: Path, log: Path, bare: Measured) -> Measured:
    K, placing, survey = contender.num_processes, setting.placing, setting.survey
    task = Task(
        kind=contender.kind,
        words=words_of(contender, setting, bare.num_updates),
        size=K,
        sizes=survey.sizes,
        granularity=survey.granularity,
        overwrites=survey.overwrites,
        target=survey.target.to_json(),
        threads=contender.threads,
        cores=None if placing.cores is None else shares(placing.cores, K, contender.threads),
        micro_batches=contender.micro_batches,
        samples=contender.samples,
        num_updates=bare.num_updates,
        rendezvous="env://" if placing.prefix else f"file://{folder / 'rendezvous'}",
        folder=str(folder),
    )
    task.save(folder / "task.json")
    command = [sys.executable, "-m", "adl_dist.cli.bench.baseline_rank", str(folder / "task.json")]
    threads = {"OMP_NUM_THREADS": str(contender.threads)}
    if placing.prefix:
        children = _placed(Child(command=command, log=log, environment=threads), placing, K)
        children = [replace(child, command=[*child.command, str(r)]) for r, child in enumerate(children)]
    else:
        local = _on_loopback()
        children = [
            Child(
                command=[*command, str(rank)],
                log=log.with_name(f"{log.name}-rank{rank}.log"),
                environment={**threads, **local, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(K)},
            )
            for rank in range(K)
        ]
    run_together(children, timeout_seconds=setting.timeout_seconds)
    found = [json.loads(result_file(folder, rank).read_text()) for rank in range(K)]
    seconds = max(seconds_per_update(rank["ends"], warmup=contender.warmup) for rank in found)
    return replace(
        bare,
        images_per_second=contender.samples / seconds,
        seconds_per_update=seconds,
        peak_memory_bytes=[rank["peak_memory_bytes"] for rank in found],
        command=command,
    )


def shares(cores: Sequence[int], num_processes: int, threads: int) -> list[list[int]] | None:
    """Which cores each process is bound to: as many as a single one has threads, or its share of all.

    Returns:
        None: there are fewer cores than processes, so that any binding would be in the way.
    """
    K, n = num_processes, len(cores)
    if K == 1:
        return [list(cores[:threads])]
    return None if n < K else [list(cores[rank * n // K : (rank + 1) * n // K]) for rank in range(K)]


def _placed(child: Child, placing: RankPlacement, num_processes: int) -> list[Child]:
    """``child`` as so many ranks, each with its own prefix, as torchrun would start one on each of several nodes."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(num_processes):
        prefix = [word.replace("{rank}", str(rank)) for word in placing.prefix]
        environment = {
            **child.environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": placing.master_addr,
            "MASTER_PORT": str(port),
            **({INTERFACE: placing.interface} if placing.interface else {}),
        }
        children.append(
            Child(
                command=[*prefix, *child.command],
                log=child.log.with_name(f"{child.log.stem}-rank{rank}.log"),
                environment=environment,
                ends_with_us=False,
            )
        )
    return children


def _on_loopback() -> dict[str, str]:
    """On one machine nothing has to be reachable from outside; a user's own choice stands."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if name is None or INTERFACE in os.environ else {INTERFACE: name}


def as_json(measured: Measured) -> dict[str, Any]:
    """Plain values; what is not there is absent."""
    told = {name: value for name, value in vars(measured).items() if value is not None and value != ()}
    told["command"] = shlex.join(measured.command)
    return {name: value for name, value in told.items() if not (isinstance(value, float) and math.isnan(value))}
