"""Count the updates to the target: runs with several seeds, the rate tuned the same way for all."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.sweep import Job, Sweep, locked, naming, run_all
from adl_dist.errors import ConfigError
from adl_dist.report.goal import falls
from adl_dist.report.recorder import METRICS
from benchmarks.race.contenders import REPLICAS, Recipe

MEASURED = ("accuracy", "loss")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A metric of the validation after each epoch, and the value that is to be reached."""

    metric: str
    value: float

    def is_met(self, value: float) -> bool:
        """Whether ``value`` is as good or better."""
        return value <= self.value if falls(self.metric) else value >= self.value

    def best(self, values: Sequence[float]) -> float:
        """Return the best of ``values``; the worst there is if there are none."""
        worst = math.inf if falls(self.metric) else -math.inf
        return min(values, default=worst) if falls(self.metric) else max(values, default=worst)

    def __str__(self) -> str:
        return f"validation {self.metric} of {self.value:g}"


def read_target(text: str) -> Target:
    """Return the target that ``text`` names, like ``accuracy=0.9``.

    Raises:
        ConfigError: If it names no metric that all contenders measure.
    """
    metric, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not metric or not math.isfinite(number):
        raise ConfigError(f"--target {text} is no target; write a metric and its value, like accuracy=0.9 or loss=1.5")
    if metric not in MEASURED:
        raise ConfigError(
            f"--target {text}: every contender measures {' and '.join(MEASURED)} of the validation; use one"
        )
    return Target(metric=metric, value=number)


@dataclass(frozen=True, kw_only=True)
class RaceConfig:
    """The settings that the runs of all contenders share."""

    words: Sequence[str]  # the user's settings, with the cut
    only_values: Sequence[str]  # further settings of these runs only, like another device
    folder: Path
    rates: Sequence[float]
    seeds: Sequence[int]
    target: Target
    side_by_side: int | None
    command: str


@dataclass(frozen=True, kw_only=True)
class UpdatesToTarget:
    """The updates to the target in the runs of one way to train."""

    rate: float | None  # the best one with the first seed, once all trials have ended
    updates: Sequence[int | None]  # to the target, of each ended seed; None if it was not reached
    best: Sequence[float]  # the best value of the metric that each seed saw
    trials: Mapping[str, int | None]  # by rate: updates to the target with the first seed
    at_edge: bool = False  # whether the best rate is the least or the largest that was tried

    @property
    def median(self) -> float:
        """Updates to the target; infinite where half of the seeds or more did not get there."""
        return statistics.median(math.inf if u is None else u for u in self.updates) if self.updates else math.inf


def find_updates(values: Sequence[Recipe], race: RaceConfig, *, start: bool = True) -> dict[str, UpdatesToTarget]:
    """Run the missing runs if ``start``; return the results of ``values`` by name."""
    found = dict[str, UpdatesToTarget]()
    with locked(race.folder):
        jobs = {one.name: [_job(one, race, rate, race.seeds[0]) for rate in race.rates] for one in values}
        if start:
            run_all([job for trials in jobs.values() for job in trials], _sweep(race, jobs), of="trials of the rate")
        chosen = {one.name: _best(jobs[one.name], race) for one in values}
        later = {
            one.name: [_job(one, race, rate, seed) for seed in race.seeds[1:]]
            for one in values
            if (rate := chosen[one.name]) is not None
        }
        if start and any(later.values()):
            run_all([job for runs in later.values() for job in runs], _sweep(race, later), of="runs")
    for one in values:
        rate, trials = chosen[one.name], dict(zip(race.rates, jobs[one.name], strict=True))
        runs = [job for job in ([trials[rate]] if rate is not None else []) + later.get(one.name, []) if _ended(job)]
        found[one.name] = UpdatesToTarget(
            rate=rate,
            updates=[updates_to(job.folder, race.target) for job in runs],
            best=[race.target.best([value for _, value in curve(job.folder, race.target)]) for job in runs],
            trials={f"{r:g}": updates_to(job.folder, race.target) for r, job in trials.items() if _ended(job)},
            at_edge=len(race.rates) > 1 and rate in (min(race.rates), max(race.rates)),
        )
    return found


def curve(folder: Path, target: Target) -> list[tuple[int, float]]:
    """Return pairs of the updates done and the metric then, after each epoch of the run in ``folder``."""
    path, pairs = folder / METRICS, list[tuple[int, float]]()
    for line in path.read_text().splitlines() if path.is_file() else ():
        if f'"validation/{target.metric}"' in line:
            record = json.loads(line)
            pairs.append((record["update"] + 1, record["value"]))
    return pairs


def updates_to(folder: Path, target: Target) -> int | None:
    """Return the updates until a validation first met the target, or None if none did."""
    return next((updates for updates, value in curve(folder, target) if target.is_met(value)), None)


def _ended(job: Job) -> bool:
    return job.status != "unfinished"


def _best(trials: Sequence[Job], race: RaceConfig) -> float | None:
    """Return the rate that got to the target first, or failing that came nearest; None while one is not at its end."""
    if not all(map(_ended, trials)):
        return None

    def order(place: int) -> tuple[float, float]:
        updates = updates_to(trials[place].folder, race.target)
        best = race.target.best([value for _, value in curve(trials[place].folder, race.target)])
        return (math.inf if updates is None else updates), (best if falls(race.target.metric) else -best)

    return race.rates[min(range(len(trials)), key=order)]


def _job(values: Recipe, race: RaceConfig, rate: float, seed: int) -> Job:
    folder = race.folder / values.name / f"lr{rate:g}-seed{seed}"
    quoted = str(folder).replace("'", "\\'")
    is_replicas, is_cut = values.program[0] == REPLICAS, "method=bp" not in values.settings
    common = [*race.words, *race.only_values, *values.settings, f"optimizer.lr={rate!r}", f"seed={seed}"]
    common += ["runtime.tensorboard=false", f"runtime.processes={str(is_replicas).lower()}", "runtime.threads=1"]
    common += [] if is_cut else ["partition.num_stages=1", "partition.balance=even"]
    overrides = [*common, "hydra.mode=RUN", f"run_dir='{quoted}'"]
    with naming(values.name):
        config, plain = compose_run(overrides)
    return Job(overrides=overrides, folder=folder, config=config, plain=plain, program=values.program)


def _sweep(race: RaceConfig, jobs: Mapping[str, Sequence[Job]]) -> Sweep:
    return Sweep(
        jobs=[job for runs in jobs.values() for job in runs],
        run_dir=race.folder,
        side_by_side=race.side_by_side,
        launcher=(),
        command=race.command,
    )
