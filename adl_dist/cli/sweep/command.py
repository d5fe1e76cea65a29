"""A sweep: check all runs, start incomplete ones, and compare."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks  # for a HydraContext; there is no public way
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from adl_dist.checkpoint.ownership import Ownership
from adl_dist.checkpoint.run_dir import RunFolder, make_folder
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import config_folder, readable
from adl_dist.cli.config.reading import chosen_sizes, read_units
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import POLL_SECONDS, Child, end_all, how_it_ended, start
from adl_dist.cli.sweep.request import Job, Sweep, naming
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ConfigError, text_of
from adl_dist.report import say
from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import read_json, read_runs, status_of
from adl_dist.training.trial.trial import keeps_ties

LOG = Path("logs") / "output.log"
LAUNCHER_FOLDER = ".launcher"  # output of a launcher of Hydra, inside the folder of the sweep


def run(sweep: Sweep) -> int:
    """Run incomplete jobs and compare all; return 1 if a run failed.

    A divergence is a result, not a failure.
    """
    _check(sweep)
    with locked(sweep.run_dir):
        run_all(sweep.jobs, sweep, of="runs")
        if runs := read_runs([job.folder for job in sweep.jobs if RunFolder(job.folder).is_claimed]):
            failed = [f"failed: {job.name}, {_reason(job)}" for job in sweep.jobs if job_status(job) == "unfinished"]
            say(f"\n{write_comparison(sweep.run_dir, runs, command=sweep.command, failed=failed)}")
    return 1 if any(job_status(job) == "unfinished" for job in sweep.jobs) else 0


def run_all(jobs: Sequence[Job], sweep: Sweep, *, of: str) -> None:
    """Run the incomplete ones of ``jobs`` and print the result of each."""
    waiting = [job for job in jobs if job_status(job) == "unfinished"]
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
            check_cut(config, has_data=not sweep.launcher)


def check_cut(config: RunConfig, *, has_data: bool) -> None:
    """Check the cut of a run as far as possible, with or without the data.

    Raises:
        PartitionError, DataError, ConfigError: If the model cannot be cut there, or cannot be read.
    """
    num_stages, balance = config.partition.num_stages, config.partition.balance
    model = instantiate.described_model(config) if config.runtime.meta_init else instantiate.build_model(config)
    if (num_stages == 1 and isinstance(balance, str)) or not has_data:
        return
    chosen_sizes(read_units(config, model, keeps=keeps_ties(config.pipeline.method)), num_stages, balance)


def job_status(job: Job) -> str:
    """Return the status of a job's run, see :mod:`adl_dist.report.runs`."""
    return status_of(job.folder, epochs=job.config.train.epochs, max_updates=job.config.train.max_updates)


def _outcome(job: Job, code: int | None = None) -> str:
    """Describe the result of ``job`` in a few words."""
    match job_status(job):
        case "complete":
            summary = read_json(job.folder / "summary.json")
            if "validation_accuracy" in summary:
                return f"accuracy {summary['validation_accuracy']:.2%}"
            return f"loss {summary['validation_loss']:.4f}" if "validation_loss" in summary else "complete"
        case "diverged":
            where = read_json(job.folder / "diverged.json")
            return f"diverged at update {where.get('update')} (epoch {where.get('epoch', -1) + 1})"
        case _:
            how = "" if code is None else f"{how_it_ended(code)}; "
            return f"failed ({how}see {job.folder / LOG})"


def _reason(job: Job) -> str:
    """Return the error that ended a run, or the file that may tell of it."""
    log = job.folder / LOG
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    said = [line.removeprefix("adl-dist: ") for line in lines if line.startswith("adl-dist: error: ")]
    return said[-1].removeprefix("error: ") if said else f"see {log}"


def _run_here(jobs: Sequence[Job], *, at_once: int | None) -> Iterator[tuple[Job, int]]:
    """Run ``jobs`` as processes, ``at_once`` at a time; yield exit codes.

    If ``at_once`` is None, as many as there are cores for; on a GPU one, since only the user knows how many fit.
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
        if all(job_status(job) == "unfinished" for job in jobs):
            raise ConfigError(f"{sweep.launcher[0]} has brought none of the runs to an end: {message}") from error
        return message
    return ""


def _run_numbered(jobs: Sequence[Job], folder: str, _: Any) -> None:
    """Run one job in a process of the launcher, which knows its number."""
    os.chdir(folder)  # run folders are relative to it
    list(_run_here([jobs[HydraConfig.get().job.num]], at_once=1))  # the run folder holds its result


def _has_room(running: Sequence[RunConfig], config: RunConfig, at_once: int | None) -> bool:
    if at_once is not None:
        return len(running) < at_once
    if not running:
        return True
    together = [*running, config]
    if any(one.runtime.device == "cuda" for one in together):
        return False
    return num_cores() >= sum(c.threads * (c.pipeline.num_processes if c.runtime.processes else 1) for c in together)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other sweeps inside the block."""
    make_folder(folder)
    ownership = Ownership(folder)
    if not ownership.take():
        raise ConfigError(f"run_dir={folder}: another sweep is running here; wait for it, or choose another run_dir")
    try:
        yield
    finally:
        ownership.release()
