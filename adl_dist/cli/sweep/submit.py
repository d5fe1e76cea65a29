"""The runs of a sweep by a launcher of Hydra, like submitit's, which gives them to a cluster."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks  # what a HydraContext needs; there is no public way
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from adl_dist.cli.config.compose import config_folder, readable
from adl_dist.cli.sweep.runner import OUTCOME, Job, Outcome, outcome_of, run_side_by_side
from adl_dist.errors import ConfigError

FOLDER = ".launcher"  # of what the launcher writes, inside that of the sweep


def submitted(jobs: Sequence[Job], *, launcher: Sequence[str], folder: Path) -> Iterator[tuple[Job, Outcome]]:
    """Hand ``jobs`` to a launcher of Hydra, one process each, and wait for their ends.

    Args:
        jobs: to run; their folders must be the same wherever they run.
        launcher: words that choose it and its settings, like ``hydra/launcher=submitit_slurm``.
        folder: of the sweep.

    Yields:
        Each job with its outcome.

    Raises:
        ConfigError: there is no such launcher or setting, or it brings no run to an end.
    """
    if not jobs:
        return
    for job in jobs:  # what an attempt before came to must not answer for this one
        (job.folder / OUTCOME).unlink(missing_ok=True)
    told = ""
    there = str((folder / FOLDER).resolve()).replace("'", "\\'")
    words = [
        *launcher,
        f"hydra.sweep.dir='{there}'",
        "hydra.sweep.subdir=${hydra.job.num}",
        "hydra.output_subdir=null",
        "hydra.job.name=adl-dist",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3", job_name="adl-dist"):
            config = compose("config", overrides=words, return_hydra_config=True)
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            HydraConfig.instance().set_config(config)
            Plugins.instance().instantiate_launcher(
                hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks()),
                task_function=partial(_run_numbered, jobs, os.getcwd()),
                config=config,
            ).launch([[] for _ in jobs], initial_job_idx=0)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, launcher)) from error
    except Exception as error:  # a launcher raises the first failure of a job, or whatever its cluster said
        told = " ".join(str(error).split())
        if all(outcome_of(job).status == "open" for job in jobs):
            raise ConfigError(f"{launcher[0]} has brought none of the runs to an end: {told}") from error
    for job in jobs:
        outcome = outcome_of(job)
        if outcome.status == "open":
            why = f"; {launcher[0]} said: {told}" if told else ""
            outcome = Outcome(status="failed", said=f"failed (ended without a word; see {folder / FOLDER}{why})")
        yield job, outcome


def _run_numbered(jobs: Sequence[Job], started_in: str, _: Any) -> None:
    """Run, in a process of the launcher, the job that it is there for."""
    os.chdir(started_in)  # the folders of jobs are relative to it
    job = jobs[HydraConfig.get().job.num]
    for _job, _outcome, _seconds in run_side_by_side([job], at_once=1):
        pass  # it is written in the job's folder
