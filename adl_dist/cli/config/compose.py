"""From the words of a command line to a checked :class:`RunConfig`. Every mistake ends in one readable line."""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.cli.config.schema import RunConfig
from adl_dist.errors import ConfigError

LAUNCHER = "hydra/launcher"
# Nodes that name a callable and hold its arguments, whatever these are.
OPEN_NODES = ("model", "data", "optimizer", "lr_schedule", "loss")

Plain = dict[str, Any]


@dataclass(kw_only=True)
class SweepConfig:
    """``sweep.*``, which only several runs have.

    Attributes:
        jobs: number of runs at the same time; None: as many as there are cores for.
        variants: settings that belong together, by the name of their folder; each is run with every swept value.
    """

    jobs: int | None = None
    variants: dict[str, list[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Composed(RunConfig):
    """What Hydra composes: a run, and which runs are asked for instead of it."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def config_folder() -> Path:
    """``conf/``: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose_run(words: Sequence[str]) -> tuple[RunConfig, Plain]:
    """Compose the configuration of a run.

    Args:
        words: Hydra overrides, like ``model=resnet56 train.epochs=2``.

    Returns:
        The checked configuration, and the same as plain values for ``config.yaml``.

    Raises:
        ConfigError: an unknown or misspelt key, a wrong type, an impossible value, a missing one.
    """
    words = [word.replace("partition.grain=", "partition.granularity=", 1) for word in words]  # its former name
    words = allow_extra_keys(words)
    composed = composed_of(words)
    choices = composed.hydra.runtime.choices
    try:
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        config = OmegaConf.to_object(composed)
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, words)) from error
    assert isinstance(config, RunConfig)
    assert isinstance(plain, dict)
    del plain["sweep"]
    if config.run_dir is None:
        config.run_dir = _default_run_dir(config, choices)
    # Of the method's keys those that mean something to it, with what they stand for.
    method = config.method.chosen().settings
    return config, {**{str(k): v for k, v in plain.items()}, "method": method, "run_dir": config.run_dir}


def known_run(run_dir: Path) -> RunConfig:
    """Return the configuration that a run folder was made with.

    Raises:
        ConfigError: no run folder.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"run_dir={run_dir} is not a run folder: it has no config.yaml; train first, or correct the path"
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), yaml.safe_load(file.read_text()))
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not the configuration of a run made by the command line: {error}") from error
    assert isinstance(config, RunConfig)
    config.init_from = None  # its checkpoints hold what became of that
    return config


def simple_options(
    words: Sequence[str], *, command: str, required: Mapping[str, str], optional: Sequence[str]
) -> Plain:
    """Read ``key=value`` words of a command that takes only a few.

    Raises:
        ConfigError: a word that is not one of them, or one that is missing.
    """
    options: Plain = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in (*required, *optional):
            taken = ", ".join(f"{name}=" for name in (*required, *optional))
            raise ConfigError(f"adl-dist {command} does not know '{word}'; it takes {taken}")
        options[key] = value
    for name, example in required.items():
        if not options.get(name):
            raise ConfigError(f"adl-dist {command} needs {name}=, for example {name}={example}")
    return options


def composed_of(words: Sequence[str]) -> DictConfig:
    """Return what Hydra makes of ``words``, with its own node ``hydra``; nothing but the keys is checked.

    Raises:
        ConfigError: an unknown key or choice, or a value of the wrong type.
    """
    ConfigStore.instance().store(name="schema", node=Composed)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose("config", overrides=list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, words)) from error


def allow_extra_keys(words: Sequence[str]) -> list[str]:
    """Let open nodes take any key, and start from an empty node where a new ``_target_`` is given."""
    parsed = [parse(word) for word in words]
    chosen = {p.key_or_group for p in parsed if not isinstance(p.value(), dict)}
    opened: list[str] = []
    for word, override in zip(words, parsed, strict=True):
        node, _, rest = override.key_or_group.partition(".")
        if node not in OPEN_NODES:
            word = word.lstrip("+")  # what Hydra would add there, no one would read
        if override.key_or_group.startswith("sweep.variants.") and not override.is_delete():
            word = f"++{word}"
        if node in OPEN_NODES and rest:
            if rest == "_target_" and node != "loss" and node not in chosen:
                opened.insert(0, f"{node}=custom")
            if not override.is_delete() and not word.startswith("+"):
                word = f"++{word}"
        opened.append(word)
    return opened


def parse(word: str, *, several: bool = False) -> Override:
    """Read one word, with Hydra's grammar.

    Raises:
        ConfigError: it is no KEY=VALUE, or gives several values where these are not asked for.
    """
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"'{word}' cannot be read; write KEY=VALUE, like train.epochs=2, and quote a VALUE that holds "
            "brackets, commas or spaces: \"run_dir='a, b'\""
        ) from error
    key = override.key_or_group
    if not key:
        raise ConfigError(f"'{word}' names no key; write KEY=VALUE, like train.epochs=2")
    if override.is_sweep_override():
        if several:
            return override
        raise ConfigError(
            f"{word} gives several values, but one command is one run; add --multirun to run them all; a list is "
            f"written {key}=[1,2]"
        )
    if key == "method.name":
        raise ConfigError(f"{word}: choose a method by method=NAME, which brings its settings along")
    of_hydra = re.split(r"[./]", key)[0] == "hydra" and word not in ("hydra.mode=RUN", "hydra.mode=MULTIRUN")
    if of_hydra and not is_of_launcher(key):
        raise ConfigError(f"there is no key '{key}'; adl-dist train --help lists all keys")
    if (config_folder() / key).is_dir() and not override.is_delete() and not isinstance(override.value(), str | dict):
        raise ConfigError(f"{word} is no choice of {key}; choose one of {', '.join(_choices(key))}")
    return override


def is_of_launcher(key: str) -> bool:
    """Whether a key is about the launcher of Hydra that starts the runs of a sweep."""
    return key == LAUNCHER or key.startswith("hydra.launcher.")


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _default_run_dir(config: RunConfig, choices: Mapping[str, str]) -> str:
    method, num_stages = config.method.chosen(), config.partition.num_stages
    return (
        f"runs/{named('data', config, choices)}-{named('model', config, choices)}-{method.name}"
        f"-k{num_stages}-m{method.micro_batches_per_update}-seed{config.seed}"
    )


def named(node: str, config: Any, choices: Mapping[str, str]) -> str:
    """Return what folders call the choice of ``node``: with its ``name`` if a target makes many."""
    choice, chosen = choices[node], getattr(config, node)
    if choice == "custom":
        choice = str(chosen["_target_"]).rpartition(".")[2]
    return f"{choice}-{chosen['name']}" if "name" in chosen else choice


def readable(error: Exception, words: Sequence[str]) -> str:
    """Return what Hydra or OmegaConf say about ``words``, in one line."""
    text = str(error)
    if match := re.search(r"Could not override '([^']*)'", text):
        # Of a whole node, like runtime={a: 1}, only the cause knows the key; of an unknown node it knows less.
        key = max(match[1], getattr(error.__cause__, "full_key", None) or "", key=len)
        return f"there is no key '{key}'{_did_you_mean(key)}; adl-dist train --help lists all keys"
    if match := re.search(r"Could not find '([^']*)'", text):
        group, _, name = match[1].rpartition("/")
        if group == LAUNCHER:
            extra = "pip install -c constraints.txt -e '.[slurm]' in the checkout"
            return f"there is no {group}={name}; the submitit launchers come by {extra}"
        known = _choices(group) if group else []
        listed = f"; choose one of {', '.join(known)}" if known else ""
        return f"there is no {group}={name}{listed}" if group else f"there is no configuration '{match[1]}'"
    if isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    full_key = getattr(error, "full_key", None)
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "Missing mandatory value" in text and full_key:
        return f"{full_key} must be given: add {full_key}=VALUE"
    first = first.removeprefix(f"Error merging override {full_key}").strip()
    given = next((w for w in words if full_key and w.lstrip("+").startswith(f"{full_key}=")), None)
    return f"{given or full_key}: {first}" if full_key else first


def _did_you_mean(key: str) -> str:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        base = OmegaConf.to_container(compose("config"), resolve=False)
    assert isinstance(base, dict)
    known = [name for name in _dotted(base) if not key.startswith(f"{name}.")]
    # The whole name, or failing that the last part under the same or another node.
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        tails = {name.rpartition(".")[2]: name for name in known}
        close = [tails[t] for t in difflib.get_close_matches(key.rpartition(".")[2], tails, n=1)]
    return f"; did you mean '{close[0]}'?" if close else ""


def _dotted(tree: Mapping[Any, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in tree.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            names += _dotted(value, f"{prefix}{name}.")
    return names


def print_keys(words: Sequence[str] = ()) -> None:
    """Print every key with what it is after ``words``; without any, its default."""
    _, plain = compose_run([*words, "hydra.mode=RUN"])
    told = f"after {' '.join(words)}" if words else "by default"
    sys.stdout.write(f"Keys and what they are {told} (KEY=VALUE changes one; nested keys are joined by dots):\n\n")
    sys.stdout.write(yaml.safe_dump(plain, sort_keys=False))
    sys.stdout.write("\nGroups (GROUP=CHOICE):\n")
    for group in sorted(path for path in Path(config_folder()).iterdir() if path.is_dir()):
        choices = ", ".join(sorted(path.stem for path in group.glob("*.yaml")))
        sys.stdout.write(f"  {group.name:<12}{choices}\n")
    sys.stdout.write("\nadl-dist train --multirun KEY=A,B ... runs all combinations and compares them.\n")
