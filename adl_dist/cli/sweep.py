"""Several runs in one command: which they are, what has to hold before the first one starts, and their comparison."""

import fcntl
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.cli import build
from adl_dist.cli.compose import Plain, SweepConfig, compose_run, composed_of, named, opened_up, parse, readable
from adl_dist.cli.jobs import Job, Outcome, outcome_of, run_side_by_side
from adl_dist.cli.schema import Device, RunConfig
from adl_dist.errors import AdlError, ConfigError
from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import Run
from adl_dist.runtime.process import num_cores
from adl_dist.runtime.run_folder import RunFolder, make_folder
from adl_dist.runtime.world import launched_world_size

FLAGS = ("--multirun", "-m")  # Hydra's own
STAGES, SEED = "partition.num_stages", "seed"  # these two make columns and spreads; all other keys make rows


@dataclass(frozen=True, kw_only=True)
class Request:
    """Several runs, as a command line asks for them.

    Attributes:
        words: what all of them have in common.
        swept: the values of each swept key, as words.
        variants: the words of each variant, by its name.
        side_by_side: how many at the same time, if the user said so.
        run_dir: the folder of all of them.
        command: what the user wrote.
    """

    words: Sequence[str]
    swept: dict[str, list[str]]
    variants: dict[str, list[str]]
    side_by_side: int | None
    run_dir: Path
    command: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a sweep, checked."""

    label: str
    config: RunConfig
    plain: Plain
    job: Job


def requested(words: Sequence[str]) -> Request | None:
    """Find out which runs a command line asks for; None: just one.

    Several are asked for by ``--multirun``, or by an experiment with ``hydra.mode: MULTIRUN``, whose
    ``hydra.sweeper.params`` are then swept as well; ``hydra.mode=RUN`` asks for one run with its settings.

    Raises:
        ConfigError: a word that cannot be read, or that means nothing here.
    """
    command = shlex.join(["adl-dist", "train", *words])
    flag = any(word in FLAGS for word in words)
    words = [word for word in words if word not in FLAGS]
    parsed = {word: parse(word, several=True) for word in words}
    single = [word for word in words if not parsed[word].is_sweep_override()]
    composed = composed_of(opened := opened_up([*single, *(["hydra.mode=MULTIRUN"] if flag else [])]))
    of_the_sweep = [word for word in single if parsed[word].key_or_group.partition(".")[0] == "sweep"]
    if composed.hydra.mode != RunMode.MULTIRUN:
        for word in words:
            parse(word)  # refuses several values
        if of_the_sweep:
            raise ConfigError(f"{of_the_sweep[0]} means nothing to a single run; add --multirun, or leave it away")
        return None
    if launched_world_size() is not None:
        raise ConfigError("several runs are processes of their own; start adl-dist train --multirun without torchrun")
    try:
        config = OmegaConf.to_object(composed.sweep)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error, opened)) from error
    assert isinstance(config, SweepConfig)
    if config.jobs is not None and config.jobs < 1:
        raise ConfigError(f"sweep.jobs must be at least 1, got {config.jobs}")
    given = {override.key_or_group for override in parsed.values()}
    params = {k: v for k, v in (composed.hydra.sweeper.params or {}).items() if k not in given}
    several = [word for word in words if word not in single] + [f"{key}={value}" for key, value in params.items()]
    overrides = [parse(word, several=True) for word in several]
    swept = {override.key_or_group: _values(override) for override in overrides}
    for label, variant in config.variants.items():
        _check_variant(label, variant, fixed=(given | params.keys()) - {STAGES})
    choices = composed.hydra.runtime.choices
    nodes = [choices.experiment or "sweep", *(named(n, composed, choices) for n in ("data", "model") if n not in swept)]
    kept = [w for w in single if w not in of_the_sweep and parsed[w].key_or_group not in ("hydra.mode", "run_dir")]
    return Request(
        words=[*kept, "hydra.mode=RUN"],
        swept=swept,
        variants=config.variants or {"": []},
        side_by_side=config.jobs,
        run_dir=Path(composed.run_dir or f"runs/{'-'.join(nodes)}"),
        command=command,
    )


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
    side_by_side = request.side_by_side or _default_side_by_side([planned.config for planned in plan])
    with _own(request.run_dir):
        _say(
            f"{len(plan)} runs in {request.run_dir}, {len(waiting)} of them to do, {side_by_side} side by side; "
            "Ctrl-C interrupts them, the same command goes on"
        )
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


def _values(override: Override) -> list[str]:
    """One word for each value."""
    key = override.key_or_group
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        raise ConfigError(f"{override.input_line} cannot be enumerated; list its values: {key}=A,B") from None


def _check_variant(label: str, variant: Sequence[str], *, fixed: set[str]) -> None:
    with _told_of(f"sweep.variants, '{label}'"):
        for word in variant:
            if (key := parse(word).key_or_group) in fixed:
                raise ConfigError(f"{word} is its own, but {key} is also given for all variants; give it in one place")


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
            with _told_of(title):
                RunFolder(folder).check(planned.plain, resume=config.resume)
                if (cut := (planned.label, config.partition.num_stages)) not in checked:
                    checked.add(cut)  # the seed changes nothing about it
                    build.check_targets(config)
                    build.check_device(config)
                    build.trainer(config, processes=False)
            plan.append(planned)
    return plan


def _plan_one(request: Request, variant: str, rows: Sequence[str], words: Sequence[str]) -> Planned:
    with _told_of(", ".join(filter(None, [variant, *rows])) or request.command):
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
    return config.runtime.threads or max(1, num_cores() // config.partition.num_stages)


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
def _told_of(whose: str) -> Iterator[None]:
    """Say which of the many an error is about."""
    try:
        yield
    except AdlError as error:
        raise ConfigError(f"{whose}: {error}") from error


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of ``folder``, whose runs would be taken for failed ones."""
    make_folder(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when the process ends
        yield
    except BlockingIOError:
        raise ConfigError(f"run_dir={folder}: another sweep is running here; wait for it, or give another") from None
    finally:
        os.close(lock)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
