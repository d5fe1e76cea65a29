"""Several runs in one command: what has to hold before the first one starts, who runs them, and their comparison."""

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adl_dist.checkpoint.run_dir import RunFolder, lock, make_folder
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Plain, compose_run, parse
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.cli.sweep.request import SEED, STAGES, Request, requested, told_of
from adl_dist.cli.sweep.runner import Job, Outcome, outcome_of, run_side_by_side
from adl_dist.cli.sweep.submit import submitted
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ConfigError
from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import Run

__all__ = ["requested", "run"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a sweep, checked."""

    label: str
    config: RunConfig
    plain: Plain
    job: Job


def run(request: Request) -> int:
    """Run what is not done yet, side by side, and compare.

    Returns:
        The exit code: 0, or 1 if a run failed. A run that diverged is a result.

    Raises:
        AdlError: before any run has started; one of them cannot be run.
    """
    plan = _planned(request)
    outcomes = {planned.job.folder: outcome_of(planned.job) for planned in plan}
    waiting = [planned.job for planned in plan if outcomes[planned.job.folder].is_open]
    with _own(request.run_dir):
        told = f"{len(plan)} runs in {request.run_dir}, {len(waiting)} of them to do"
        if request.launcher:
            _say(f"{told}, handed to {request.launcher[0]}; the same command runs what has not come to its end")
            for job, outcome in submitted(waiting, launcher=request.launcher, folder=request.run_dir):
                outcomes[job.folder] = outcome
                _say(f"{job.title}: {outcome.said}")
        else:
            side_by_side = request.side_by_side or _default_side_by_side([planned.config for planned in plan])
            _say(f"{told}, {side_by_side} side by side; Ctrl-C interrupts them, the same command goes on")
            progress = _Progress(num_runs=len(plan), num_waiting=len(waiting))
            for job, outcome, seconds in run_side_by_side(waiting, at_once=side_by_side):
                outcomes[job.folder] = outcome
                _say(progress.line(job, outcome, seconds))
        write_comparison(
            request.run_dir,
            [_run_of(planned, outcomes[planned.job.folder]) for planned in plan],
            command=request.command,
            device=_device(plan[0].config),
        )
    _say(f"\n{(request.run_dir / 'comparison.md').read_text()}")
    return 1 if any(outcome.status == "failed" for outcome in outcomes.values()) else 0


class _Progress:
    """Counts runs and guesses how long the rest takes."""

    def __init__(self, *, num_runs: int, num_waiting: int) -> None:
        self._num_runs, self._num_waiting = num_runs, num_waiting
        self._num_ended, self._seconds = 0, 0.0

    def line(self, job: Job, outcome: Outcome, seconds: float) -> str:
        """The line of a run that ended ``seconds`` after the first one started."""
        self._num_ended += 1
        left = self._num_waiting - self._num_ended
        number = f"{self._num_runs - left:>{len(str(self._num_runs))}}/{self._num_runs}"
        rest = seconds / self._num_ended * left
        guess = f"about {rest / 60:.0f} min left" if rest > 90 else f"about {rest:.0f} s left"
        return f"{number}  {job.title}: {outcome.said} in {outcome.seconds:.0f} s{f'; {guess}' if left else ''}"


def _planned(request: Request) -> list[Planned]:
    plan, checked, folders = list[Planned](), set(), dict[Path, str]()
    # Seeds last, so that an interrupted sweep has something of everything.
    keys = sorted(request.swept, key=lambda key: key != SEED)
    for values in itertools.product(*(request.swept[key] for key in keys)):
        for variant, own in request.variants.items():
            # A method whose values do not depend on K may settle on one; it then meets the others only once.
            settled = STAGES in {parse(word).key_or_group for word in own}
            met = {key: word for key, word in zip(keys, values, strict=True) if not (settled and key == STAGES)}
            rows = [word for key, word in met.items() if key not in (STAGES, SEED)]
            planned = _plan_one(request, variant, rows, [*request.words, *own, *met.values()])
            config, folder, title = planned.config, planned.job.folder, planned.job.title
            if settled and any(planned.job == other.job for other in plan):
                continue
            if folder in folders:
                raise ConfigError(f"{title} and {folders[folder]} would both be written to {folder}; leave one away")
            folders[folder] = title
            with told_of(title):
                RunFolder(folder).check(planned.plain, resume=config.resume)
                if (cut := (planned.label, config.partition.num_stages)) not in checked:
                    checked.add(cut)  # the seed changes nothing about it
                    instantiate.check_targets(config)
                    if not request.launcher:  # elsewhere there may be GPUs, or none
                        check_device(config.runtime.device.value)
                    instantiate.check_cut(config)
            plan.append(planned)
    return plan


def _plan_one(request: Request, variant: str, rows: Sequence[str], words: Sequence[str]) -> Planned:
    with told_of(", ".join(filter(None, [variant, *rows])) or request.command):
        config, plain = compose_run(words)
    method = config.method.chosen()
    default = "" if variant or rows else f"{method.name} M={method.micro_batches_per_update}"
    label = " ".join(filter(None, [variant, *map(_short, rows), default]))
    folder = request.run_dir / _as_name(label) / f"k{config.partition.num_stages}-seed{config.seed}"
    quoted = str(folder).replace("'", "\\'")
    job = Job(
        title=f"{label}  K={config.partition.num_stages} seed {config.seed}",
        words=[*words, f"run_dir='{quoted}'"],
        folder=folder,
        epochs=config.train.epochs,
        max_updates=config.train.max_updates,
        threads=_threads(config),
    )
    return Planned(label=label, config=config, plain=plain, job=job)


def _short(word: str) -> str:
    """``word`` as a table has room for it."""
    return word.removeprefix("method=").replace("method.accumulation_steps=", "M=").lstrip("+")


def _as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", label.replace("=", "")).strip("-.")


def _threads(config: RunConfig) -> int:
    return config.threads


def _default_side_by_side(configs: Sequence[RunConfig]) -> int:
    if any(config.runtime.device is Device.cuda for config in configs):
        return 1  # what fits on a GPU only the user knows
    most = max(_threads(c) * (c.partition.num_stages if c.runtime.processes else 1) for c in configs)
    return max(1, num_cores() // most)


def _run_of(planned: Planned, outcome: Outcome) -> Run:
    method = planned.config.method.chosen()
    return Run(
        label=planned.label,
        num_stages=planned.config.partition.num_stages,
        accumulation_steps=method.micro_batches_per_update,
        method=method.settings,
        seed=planned.config.seed,
        folder=planned.job.folder,
        status=outcome.status,
        ended_at_update=outcome.update,
        ended_in_epoch=outcome.epoch,
    )


def _device(config: RunConfig) -> str | None:
    return torch.cuda.get_device_name() if config.runtime.device is Device.cuda else None


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of ``folder``, whose runs would be taken for failed ones."""
    make_folder(folder)
    held = lock(folder)
    if held is None:
        raise ConfigError(f"run_dir={folder}: another sweep is running here; wait for it, or give another")
    try:
        yield
    finally:
        os.close(held)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
