"""One run of one contender in fresh processes, and its speed."""

import json
import math
import os
import shlex
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from adl_dist.checkpoint.run_dir import SUMMARY
from adl_dist.cli.bench.entries import Entry, ModelSurvey, cycle_of
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import balance_word, method_words, without_method_and_cut
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import Child, ChildFailed, run_together
from adl_dist.distributed.network import GLOO, loopback
from adl_dist.report.progress import holders
from adl_dist.report.recorder import METRICS

# Decided by the bench, besides the method and the cut; all other overrides of the user reach each run.
MANAGED_KEYS = (
    *("run_dir", "resume", "train.epochs", "train.max_updates", "train.batch_size"),
    *("runtime.processes", "runtime.threads", "runtime.bind_cores", "runtime.trace", "runtime.profile_memory"),
    *("runtime.tensorboard", "runtime.checkpoint_every_epochs", "runtime.checkpoint_every_updates", "hydra.mode"),
)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The settings that the runs of all contenders share."""

    config: RunConfig
    overrides: Sequence[str]  # that it was composed from
    survey: ModelSurvey
    log_folder: Path  # gets the output of each process
    timeout_seconds: float  # of one run
    pinned: bool = True  # whether each of several processes keeps to its share of the cores
    prefix: Sequence[str] = ()  # words before the command of each rank, {rank} in them is its number; none: all local
    master_addr: str = "127.0.0.1"  # where rank 0 is
    interface: str | None = None  # for gloo; if None, the ranks find one


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of one run."""

    contender: str
    repetition: int  # counted from 0
    num_updates: int  # with those of the warm-up, which the speeds do not count
    images_per_second: float = math.nan  # nan: it failed
    seconds_per_update: float = math.nan
    peak_memory_bytes: Sequence[int] = ()  # of each process
    busy_share: Sequence[float] | None = None  # of each stage, if known
    error: str | None = None  # of a run that failed
    command: Sequence[str] = ()  # of rank 0

    def as_json(self) -> dict[str, Any]:
        """Return the known fields as plain values."""
        known = {k: v for k, v in vars(self).items() if v not in (None, ()) and v == v}  # nan differs from itself
        return {**known, "command": shlex.join(self.command)}


def measure_once(entry: Entry, bench: BenchConfig, *, repetition: int, num_updates: int) -> Measured:
    """Run ``entry`` for ``num_updates``; return a failure as a result too."""
    measured = Measured(contender=entry.name, repetition=repetition, num_updates=num_updates)
    argv, survey = train_argv(entry, bench, num_updates), bench.survey
    with tempfile.TemporaryDirectory(prefix="adl-dist-bench-") as name:
        folder, task_file = Path(name), Path(name) / "task.json"
        if entry.kind == "ours":
            quoted = str(folder / "run").replace("'", "\\'")
            command = [sys.executable, "-m", "adl_dist", "train", *argv, f"run_dir='{quoted}'"]
        else:
            inner = entry.inner_updates and cycle_of(entry.inner_updates)
            task = {"kind": entry.kind, "argv": argv, "inner_updates": inner, "target": asdict(survey.target)}
            task_file.write_text(json.dumps(task))
            command = [sys.executable, "-m", "adl_dist.cli.bench.baseline_rank", str(task_file)]
        ranks = _ranks(command, entry, bench, bench.log_folder / f"{entry.name}-{repetition}")
        try:
            run_together(ranks, timeout_seconds=bench.timeout_seconds)
            result = _read(folder, entry.num_processes)
            seconds = max(seconds_of(entry, ends) for ends in result.pop("ends"))
        except ChildFailed as failed:
            return replace(measured, error=str(failed))
    result |= {"images_per_second": entry.samples / seconds, "seconds_per_update": seconds, "command": command}
    return replace(measured, **result)


def train_argv(entry: Entry, bench: BenchConfig, num_updates: int) -> list[str]:
    """Return the overrides for a run of ``entry`` with a single epoch."""
    survey, node = bench.survey, bench.config.data
    words = without_method_and_cut(bench.overrides)
    argv = [word for word in words if not word.lstrip("+~").startswith(MANAGED_KEYS)]
    argv += [f"runtime.channels_last={str(survey.channels_last).lower()}"]  # null is for a trial to settle
    argv += [*entry.settings, *method_words(entry.method)]
    argv += [f"partition.num_stages={entry.num_stages if entry.is_cut else entry.num_processes}"]
    if entry.is_cut:
        argv += [balance_word(survey.cuts[entry.num_stages].begins)]
    argv += [f"train.max_updates={num_updates}", "train.epochs=1", f"train.batch_size={entry.samples}"]
    argv += [f"runtime.threads={entry.threads}", f"runtime.bind_cores={str(bench.pinned).lower()}"]
    slow = "trace", "profile_memory", "tensorboard"  # only our runs
    argv += [f"runtime.{name}=false" for name in slow]
    argv += ["runtime.checkpoint_every_epochs=0", "hydra.mode=RUN"]
    # As a node, not as data._target_=, which would start from an empty one and lose the user's keys.
    argv += [f"data={{_target_:{__name__}.{stretched.__name__}}}", f"data.bench_target={node['_target_']}"]
    return [*argv, f"data.bench_samples={num_updates * entry.samples}"]


def stretched(bench_target: str, bench_samples: int, **arguments: Any) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the user's training and validation data, resized for a run.

    Training gets ``bench_samples`` samples, repeated or thinned out, so that one epoch is the whole run; validation
    gets one. ``bench_target`` is the user's own target, and ``arguments`` are for it.
    """
    train, validation = instantiate.build_data({"_target_": bench_target, **arguments})
    size = len(train)  # type: ignore[arg-type]  # check_dataset has seen that it has a length
    return Subset(train, [i * size // bench_samples for i in range(bench_samples)]), Subset(validation, [0])


def seconds_of(entry: Entry, ends: Sequence[float]) -> float:
    """Return the mean time of an update after the warm-up, from end times.

    DiLoCo is measured with shorter cycles than it trains with, so the time of an exchange is divided by H. Raise
    ChildFailed if there are too few updates.
    """
    inner_updates = entry.inner_updates or 1
    cycle = cycle_of(inner_updates)
    first = -(-entry.warmup // cycle) * cycle  # cycles count as a whole
    times = [after - before for before, after in pairwise(ends[first - 1 :])]
    exchanging, alone = times[cycle - 1 :: cycle], [t for i, t in enumerate(times, start=1) if i % cycle]
    if not exchanging or not sum(times) > 0:
        raise ChildFailed(f"{len(ends)} updates, of which {first} do not count, are too few to be measured")
    inner = statistics.fmean(alone or exchanging)
    return inner + (statistics.fmean(exchanging) - inner) / inner_updates


def _read(folder: Path, num_ranks: int) -> dict[str, Any]:
    """Return a run's ``ends``, ``peak_memory_bytes`` and ``busy_share``.

    ``ends`` are the end times of updates in seconds; ``busy_share`` is missing for torch's contenders.
    """
    if not (run_dir := folder / "run").exists():
        results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
        return {name: [result[name] for result in results] for name in ("ends", "peak_memory_bytes")}
    summary = json.loads((run_dir / SUMMARY).read_text())
    records = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    return {
        "ends": [[record["elapsed_seconds"] for record in records if record["name"] == "train/loss"]],
        "peak_memory_bytes": [one["peak_memory_bytes"] for one in holders(summary)],
        "busy_share": [stage["busy_share"] for stage in summary["stages"]],
    }


def _ranks(command: Sequence[str], entry: Entry, bench: BenchConfig, log: Path) -> list[Child]:
    """Return the commands of a run's ranks, with torchrun's environment.

    With a prefix each rank is on its own node. Local ranks use loopback, unless the user has named an interface.
    """
    K, is_local = entry.num_processes, not bench.prefix
    with socket.socket() as unused:
        unused.bind(("", 0))
        port = unused.getsockname()[1]
    shared = {"OMP_NUM_THREADS": str(entry.threads), "MASTER_ADDR": bench.master_addr, "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(K), "LOCAL_WORLD_SIZE": str(K if is_local else 1)}
    interface = bench.interface or (loopback() if is_local and GLOO not in os.environ else None)
    if interface is not None:
        shared[GLOO] = interface
    return [
        Child(
            command=[*(word.replace("{rank}", str(rank)) for word in bench.prefix), *command],
            log=log.with_name(f"{log.name}-rank{rank}.log"),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank if is_local else 0)},
            ends_with_us=is_local,
        )
        for rank in range(K)
    ]
