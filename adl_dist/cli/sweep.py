"""A sweep: several runs of one command line, started and compared."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks  # for a HydraContext; there is no public way
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # as other sweepers of Hydra do
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.checkpoint.ownership import Ownership
from adl_dist.checkpoint.run_dir import RunFolder, make_folder
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import (
    Plain,
    checked,
    compose_run,
    composed_of,
    config_folder,
    is_of_launcher,
    named,
    parse,
    readable,
)
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import POLL_SECONDS, Child, end_all, how_it_ended, last_error, start
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import AdlError, ConfigError, text_of
from adl_dist.report import say
from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import read_json, read_runs, status_of

FLAGS = ("--multirun", "-m")  # Hydra's own
STAGES, SEED = "partition.num_stages", "seed"  # they name a run within its row; all other keys name the row
OWN_LAUNCHER = "basic"  # Hydra's default, which runs one job after the other; ours takes its place
LOG = Path("logs") / "output.log"
LAUNCHER_FOLDER = ".launcher"  # output of a launcher of Hydra, inside the folder of the sweep


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: overrides, run folder, and checked configuration.

    ``program`` takes the overrides, after ``python -m``.
    """

    overrides: Sequence[str]
    folder: Path
    config: RunConfig
    plain: Plain
    program: Sequence[str] = ("adl_dist", "train")

    @property
    def name(self) -> str:
        """The last two parts of the job's folder, which no other job has."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def status(self) -> str:
        """The status of the run, see :mod:`adl_dist.report.runs`."""
        return status_of(self.folder, epochs=self.config.train.epochs, max_updates=self.config.train.max_updates)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Several runs of one command line."""

    jobs: Sequence[Job]  # those of the first seed first, so that an interrupted sweep has something of everything
    run_dir: Path  # the folder of all of them
    side_by_side: int | None  # runs at the same time; if None, as many as there are cores for
    launcher: Sequence[str]  # overrides about the launcher of Hydra; if empty, this command starts the runs
    command: str  # the user's command line


def requested(arguments: Sequence[str]) -> Sweep | tuple[RunConfig, Plain]:
    """Return the sweep of a command line, or the configuration of one run.

    ``--multirun``, or an experiment with ``hydra.mode: MULTIRUN``, asks for a sweep, also over the experiment's
    ``hydra.sweeper.params``. ``hydra.mode=RUN`` asks for one run with the experiment's settings.
    """
    overrides = [each for each in arguments if each not in FLAGS]
    parsed = {override: parse(override, several=True) for override in overrides}
    keys_of = {override: each.key_or_group for override, each in parsed.items()}
    single = [override for override in overrides if not parsed[override].is_sweep_override()]
    mode = ["hydra.mode=MULTIRUN"] if len(overrides) < len(arguments) else []
    composed = composed_of([*single, *mode])
    launcher = [override for override in single if is_of_launcher(keys_of[override])]
    of_sweep = [*(override for override in single if keys_of[override].partition(".")[0] == "sweep"), *launcher]
    if composed.hydra.mode != RunMode.MULTIRUN:
        for override in overrides:
            parse(override)  # refuses several values
        if of_sweep:
            raise ConfigError(f"{of_sweep[0]} means nothing to a single run; add --multirun, or omit it")
        return checked(composed, overrides)
    if launched_world_size() is not None:
        raise ConfigError("several runs are processes of their own; start adl-dist train --multirun without torchrun")
    side_by_side, variants = _of_sweep(composed.sweep)
    typed = set(keys_of.values())
    params = [f"{k}={v}" for k, v in (composed.hydra.sweeper.params or {}).items() if k not in typed]
    swept = [*params, *(override for override in overrides if override not in single)]
    common = [w for w in single if w not in of_sweep and keys_of[w] not in ("hydra.mode", "run_dir")]
    choices, keys = composed.hydra.runtime.choices, {_key(override) for override in swept}
    nodes = [named(node, composed, choices) for node in ("data", "model") if node not in keys]
    if "://" in str(composed.run_dir):
        raise ConfigError(f"run_dir={composed.run_dir}: a sweep needs a local folder")
    run_dir = Path(str(composed.run_dir or f"runs/{'-'.join([choices.experiment or 'sweep', *nodes])}")).expanduser()
    jobs: dict[Path, Job] = {}
    for label, variant in (variants or {"": []}).items():
        for values in _product(label, variant, swept, fixed=(typed | keys) - {STAGES}):
            job = _job(run_dir, label, [*common, "hydra.mode=RUN", *variant], values)
            if job.folder in jobs:
                raise ConfigError(f"two runs would both be written to {job.folder}; omit one of them")
            jobs[job.folder] = job
    seeds = list(dict.fromkeys(job.config.seed for job in jobs.values()))
    return Sweep(
        jobs=sorted(jobs.values(), key=lambda job: seeds.index(job.config.seed)),
        run_dir=run_dir,
        side_by_side=side_by_side,
        launcher=[] if choices["hydra/launcher"] == OWN_LAUNCHER else launcher,
        command=shlex.join(["adl-dist", "train", *arguments]),
    )


def _of_sweep(node: Any) -> tuple[int | None, dict[str, list[str]]]:
    """Return ``sweep.jobs`` and ``sweep.variants``."""
    sweep: Any = OmegaConf.to_container(node) if OmegaConf.is_dict(node) else {"jobs": node}
    jobs, variants = sweep["jobs"], sweep.get("variants") or {}
    rows = variants.values() if isinstance(variants, dict) else [None]
    are_lists = all(isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows)
    if not are_lists or (jobs is not None and (type(jobs) is not int or jobs < 1)):
        raise ConfigError(
            f"sweep={sweep}: expected jobs, a whole number of at least 1 or null, and variants, a list of settings by "
            "each name, like {stale: [method.weights=latest]}"
        )
    return jobs, variants


def _product(label: str, variant: Sequence[str], swept: Sequence[str], *, fixed: set[str]) -> list[list[str]]:
    """Return all combinations of the swept values for one variant.

    Keys that the variant sets are not swept. Raise ConfigError if such a key is also in ``fixed``, or if a sweep cannot
    be enumerated.
    """
    with naming(f"sweep.variants, '{label}'"):
        own = {parse(override).key_or_group: override for override in variant}
        if both := own.keys() & fixed:
            key = min(both)
            raise ConfigError(f"{own[key]} is its own, but {key} is also given for all variants; give it in one place")
    parsed = [parse(override, several=True) for override in swept if _key(override) not in own]
    try:
        return BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException:
        culprit = next(o for o in parsed if o.is_sweep_override() and not o.is_discrete_sweep())
        way_on = f"list its values: {culprit.key_or_group}=A,B"
        raise ConfigError(f"{culprit.input_line} cannot be enumerated; {way_on}") from None


def _job(run_dir: Path, label: str, overrides: Sequence[str], values: Sequence[str]) -> Job:
    row = [label, *(value for value in values if _key(value) not in (STAGES, SEED))]
    with naming(", ".join(filter(None, row)) or "the sweep"):
        config, plain = compose_run([*overrides, *values])
    short = [text.removeprefix("method=").replace("method.accumulation_steps=", "M").lstrip("+") for text in row]
    names = [re.sub(r"[^\w.+-]+", "-", text.replace("=", "")).strip("-.") for text in short]
    name = "-".join(filter(None, names)) or f"{config.method.name}-M{config.method.micro_batches_per_update}"
    folder = run_dir / name / f"k{config.partition.num_stages}-seed{config.seed}"
    quoted = str(folder).replace("'", "\\'")
    return Job(overrides=[*overrides, *values, f"run_dir='{quoted}'"], folder=folder, config=config, plain=plain)


def _key(override: str) -> str:
    return parse(override, several=True).key_or_group


@contextmanager
def naming(run: str) -> Iterator[None]:
    """Put ``run`` in front of an AdlError of the block, as a ConfigError."""
    try:
        yield
    except AdlError as error:
        raise ConfigError(f"{run}: {error}") from error


def run(sweep: Sweep) -> int:
    """Run incomplete jobs and compare all; return 1 if a run failed.

    A divergence is a result, not a failure.
    """
    _check(sweep)
    with locked(sweep.run_dir):
        run_all(sweep.jobs, sweep, of="runs")
        failed = [job for job in sweep.jobs if job.status == "unfinished"]
        if runs := read_runs([job.folder for job in sweep.jobs if RunFolder(job.folder).is_claimed]):
            lines = [f"failed: {job.name}, {last_error(job.folder / LOG)}; see {job.folder / LOG}" for job in failed]
            say(f"\n{write_comparison(sweep.run_dir, runs, command=sweep.command, notes=lines)}")
    return 1 if failed else 0


def _check(sweep: Sweep) -> None:
    """Check all jobs before the first one starts."""
    cases = set()
    for job in sweep.jobs:
        config = job.config
        with naming(job.name):
            RunFolder(job.folder).check(job.plain, resume=config.resume, waits=False)
            if (case := (job.folder.parent, config.partition.num_stages)) in cases:  # any seed gives the same
                continue
            cases.add(case)
            instantiate.check_targets(config)
            if not sweep.launcher:  # which GPUs there are elsewhere is not known here
                check_device(config.runtime.device)
            instantiate.check_cut(config, has_data=not sweep.launcher)


def run_all(jobs: Sequence[Job], sweep: Sweep, *, of: str) -> None:
    """Run the incomplete jobs, and print the result of each."""
    waiting = [job for job in jobs if job.status == "unfinished"]
    note = "; the same command continues what has not come to its end"
    say(f"{len(jobs)} {of} in {sweep.run_dir}, {len(waiting)} of them to do{note}")
    if sweep.launcher and waiting:
        message = _submit(waiting, sweep)
        for job in waiting:
            say(f"{job.name}: {_outcome(job)}")
        if message:
            say(f"{sweep.launcher[0]} said: {message}; see {sweep.run_dir / LAUNCHER_FOLDER}")
        return
    started = time.monotonic()
    for number, (job, code) in enumerate(_run_here(waiting, at_once=sweep.side_by_side), start=1):
        left = (len(waiting) - number) * (time.monotonic() - started) / number
        say(f"{number}/{len(waiting)}  {job.name}: {_outcome(job, code)}; about {left / 60:.0f} min left")


def _outcome(job: Job, code: int | None = None) -> str:
    """Describe the result of ``job`` in a few words."""
    if (status := job.status) == "diverged":
        where = read_json(job.folder / "diverged.json")
        return f"diverged at update {where.get('update')} (epoch {where.get('epoch', -1) + 1})"
    if status == "unfinished":
        return f"failed ({f'{how_it_ended(code)}; ' if code is not None else ''}see {job.folder / LOG})"
    summary = read_json(job.folder / "summary.json")
    if "validation_accuracy" in summary:
        return f"accuracy {summary['validation_accuracy']:.2%}"
    return f"loss {summary['validation_loss']:.4f}" if "validation_loss" in summary else "complete"


def _run_here(jobs: Sequence[Job], *, at_once: int | None) -> Iterator[tuple[Job, int]]:
    """Run ``jobs`` as processes; yield each job with its exit code.

    At most ``at_once`` jobs run at a time. If None, as many run as there are cores for; on a GPU one, because only the
    user knows how many fit.
    """
    waiting, running = list(reversed(jobs)), list[tuple[Job, subprocess.Popen[bytes]]]()
    try:
        while waiting or running:
            while waiting and _has_room([job.config for job, _ in running], waiting[-1].config, at_once):
                job = waiting.pop()
                command = [sys.executable, "-m", *job.program, *job.overrides]
                threads = {"OMP_NUM_THREADS": str(job.config.threads)}  # numpy's would compete with torch's
                running.append((job, start(Child(command=command, log=job.folder / LOG, environment=threads))))
            ended = [(job, process) for job, process in running if process.poll() is not None]
            for job, process in ended:
                running.remove((job, process))
                yield job, process.returncode
            if not ended:
                time.sleep(POLL_SECONDS)  # no portable call waits for several processes
    finally:
        end_all([process for _, process in running])


def _has_room(running: Sequence[RunConfig], config: RunConfig, at_once: int | None) -> bool:
    together = [*running, config]
    if at_once is not None or not running:
        return len(together) <= (at_once or 1)
    cores = sum(c.threads * (c.pipeline.num_processes if c.runtime.processes else 1) for c in together)
    return cores <= num_cores() and not any(one.runtime.device == "cuda" for one in together)


def _submit(jobs: Sequence[Job], sweep: Sweep) -> str:
    """Submit ``jobs`` to a Hydra launcher and wait; return the error, if any."""
    folder = str((sweep.run_dir / LAUNCHER_FOLDER).resolve()).replace("'", "\\'")
    silent = "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"
    numbered = f"hydra.sweep.dir='{folder}'", "hydra.sweep.subdir=${hydra.job.num}", "hydra.job.name=adl-dist"
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3", job_name="adl-dist"):
            config = compose("config", overrides=[*sweep.launcher, *numbered, *silent], return_hydra_config=True)
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            HydraConfig.instance().set_config(config)
            Plugins.instance().instantiate_launcher(
                hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks()),
                task_function=partial(_run_numbered, jobs, os.getcwd()),
                config=config,
            ).launch([[] for _ in jobs], initial_job_idx=0)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, sweep.launcher)) from error
    except Exception as error:  # a launcher raises the first failure of a job, or the error of its cluster
        message = text_of(error)
        if all(job.status == "unfinished" for job in jobs):
            raise ConfigError(f"{sweep.launcher[0]} has brought none of the runs to an end: {message}") from error
        return message
    return ""


def _run_numbered(jobs: Sequence[Job], folder: str, _: Any) -> None:
    """Run one job in a process of the launcher, which knows its number."""
    os.chdir(folder)  # run folders are relative to it
    list(_run_here([jobs[HydraConfig.get().job.num]], at_once=1))  # the run folder holds its result


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other sweeps inside the block."""
    make_folder(folder)
    ownership = Ownership(folder)
    if not ownership.take():
        raise ConfigError(
            f"run_dir={folder}: {ownership.holder} runs a sweep here; wait for it, or choose another run_dir"
        )
    try:
        yield
    finally:
        ownership.release()
