"""The runs of a command line, by Hydra's grammar and product."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # as other sweepers of Hydra do
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from adl_dist.cli.config import compose
from adl_dist.cli.config.compose import Plain, parse
from adl_dist.cli.config.schema import RunConfig
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import AdlError, ConfigError

FLAGS = ("--multirun", "-m")  # Hydra's own
STAGES, SEED = "partition.num_stages", "seed"  # they name a run within its row; all other keys name the row
OWN_LAUNCHER = "basic"  # Hydra's default, which runs one job after the other; ours takes its place


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
        """The last two parts of its folder, which no other job has."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Several runs."""

    jobs: Sequence[Job]  # those of the first seed first, so that an interrupted sweep has something of everything
    run_dir: Path  # the folder of all of them
    side_by_side: int | None  # runs at the same time; if None, as many as there are cores for
    launcher: Sequence[str]  # overrides about the launcher of Hydra; if empty, this command starts the runs
    command: str  # the user's command line


def requested(arguments: Sequence[str]) -> Sweep | tuple[RunConfig, Plain]:
    """Return the sweep of a command line, or the configuration of one run.

    Several are asked for by ``--multirun``, or by an experiment with ``hydra.mode: MULTIRUN``, whose
    ``hydra.sweeper.params`` are then swept as well; ``hydra.mode=RUN`` asks for one run with its settings.
    """
    command = shlex.join(["adl-dist", "train", *arguments])
    overrides = [each for each in arguments if each not in FLAGS]
    parsed = {override: parse(override, several=True) for override in overrides}
    keys_of = {override: each.key_or_group for override, each in parsed.items()}
    single = [override for override in overrides if not parsed[override].is_sweep_override()]
    mode = ["hydra.mode=MULTIRUN"] if len(overrides) < len(arguments) else []
    composed = compose.composed_of([*single, *mode])
    launcher = [override for override in single if compose.is_of_launcher(keys_of[override])]
    of_sweep = [*(override for override in single if keys_of[override].partition(".")[0] == "sweep"), *launcher]
    if composed.hydra.mode != RunMode.MULTIRUN:
        for override in overrides:
            parse(override)  # refuses several values
        if of_sweep:
            raise ConfigError(f"{of_sweep[0]} means nothing to a single run; add --multirun, or omit it")
        return compose.checked(composed, overrides)
    if launched_world_size() is not None:
        raise ConfigError("several runs are processes of their own; start adl-dist train --multirun without torchrun")
    side_by_side, variants = _of_sweep(composed.sweep)
    typed = set(keys_of.values())
    params = [f"{k}={v}" for k, v in (composed.hydra.sweeper.params or {}).items() if k not in typed]
    swept = [*params, *(override for override in overrides if override not in single)]
    common = [w for w in single if w not in of_sweep and keys_of[w] not in ("hydra.mode", "run_dir")]
    choices, keys = composed.hydra.runtime.choices, {_key(override) for override in swept}
    nodes = [compose.named(node, composed, choices) for node in ("data", "model") if node not in keys]
    if "://" in str(composed.run_dir):
        raise ConfigError(f"run_dir={composed.run_dir}: a sweep needs a local folder")
    run_dir = Path(str(composed.run_dir or f"runs/{'-'.join([choices.experiment or 'sweep', *nodes])}"))
    jobs: dict[Path, Job] = {}
    for label, variant in (variants or {"": []}).items():
        for values in _product(label, variant, swept, fixed=(typed | keys) - {STAGES}):
            job = _job(run_dir, label, [*common, "hydra.mode=RUN", *variant], values, command)
            if job.folder in jobs:
                raise ConfigError(f"two runs would both be written to {job.folder}; omit one of them")
            jobs[job.folder] = job
    seeds = list(dict.fromkeys(job.config.seed for job in jobs.values()))
    return Sweep(
        jobs=sorted(jobs.values(), key=lambda job: seeds.index(job.config.seed)),
        run_dir=run_dir,
        side_by_side=side_by_side,
        launcher=[] if choices["hydra/launcher"] == OWN_LAUNCHER else launcher,
        command=command,
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

    Keys that the variant sets are not swept.
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


def _job(run_dir: Path, label: str, overrides: Sequence[str], values: Sequence[str], command: str) -> Job:
    row = [label, *(value for value in values if _key(value) not in (STAGES, SEED))]
    with naming(", ".join(filter(None, row)) or command):
        config, plain = compose.compose_run([*overrides, *values])
    method = config.method
    short = [text.removeprefix("method=").replace("method.accumulation_steps=", "M").lstrip("+") for text in row]
    names = [re.sub(r"[^\w.+-]+", "-", text.replace("=", "")).strip("-.") for text in short]
    name = "-".join(filter(None, names)) or f"{method.name}-M{method.micro_batches_per_update}"
    folder = run_dir / name / f"k{config.partition.num_stages}-seed{config.seed}"
    quoted = str(folder).replace("'", "\\'")
    return Job(
        overrides=[*overrides, *values, f"run_dir='{quoted}'"],
        folder=folder,
        config=config,
        plain=plain,
    )


def _key(override: str) -> str:
    return parse(override, several=True).key_or_group


@contextmanager
def naming(run: str) -> Iterator[None]:
    """Put the name of the run that an error is about in front of it."""
    try:
        yield
    except AdlError as error:
        raise ConfigError(f"{run}: {error}") from error
