"""Which runs a command line asks for, if it asks for several."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.cli.config.compose import (
    SweepConfig,
    allow_extra_keys,
    composed_of,
    is_of_launcher,
    named,
    parse,
    readable,
)
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import AdlError, ConfigError

FLAGS = ("--multirun", "-m")  # Hydra's own
STAGES, SEED = "partition.num_stages", "seed"  # these two make columns and spreads; all other keys make rows
HERE = "basic"  # Hydra's own launcher, which runs one job after the other; ours is used in its place


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
        launcher: words about the launcher of Hydra that starts the runs; empty: we do, here.
    """

    words: Sequence[str]
    swept: dict[str, list[str]]
    variants: dict[str, list[str]]
    side_by_side: int | None
    run_dir: Path
    command: str
    launcher: Sequence[str]


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
    composed = composed_of(opened := allow_extra_keys([*single, *(["hydra.mode=MULTIRUN"] if flag else [])]))
    launcher = [word for word in single if is_of_launcher(parsed[word].key_or_group)]
    of_the_sweep = [w for w in single if parsed[w].key_or_group.partition(".")[0] == "sweep"] + launcher
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
    swept = {override.key_or_group: values_of(override) for override in overrides}
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
        launcher=[] if composed.hydra.runtime.choices["hydra/launcher"] == HERE else launcher,
    )


def values_of(override: Override) -> list[str]:
    """One word for each value.

    Raises:
        ConfigError: they cannot be enumerated.
    """
    key = override.key_or_group
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        raise ConfigError(f"{override.input_line} cannot be enumerated; list its values: {key}=A,B") from None


def _check_variant(label: str, variant: Sequence[str], *, fixed: set[str]) -> None:
    with told_of(f"sweep.variants, '{label}'"):
        for word in variant:
            if (key := parse(word).key_or_group) in fixed:
                raise ConfigError(f"{word} is its own, but {key} is also given for all variants; give it in one place")


@contextmanager
def told_of(whose: str) -> Iterator[None]:
    """Say which of the many an error is about."""
    try:
        yield
    except AdlError as error:
        raise ConfigError(f"{whose}: {error}") from error
