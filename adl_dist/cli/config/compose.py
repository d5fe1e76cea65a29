"""From the arguments of a command line to a checked :class:`RunConfig`. Every mistake is a ConfigError of one line."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.cli.config.schema import RunConfig
from adl_dist.errors import ConfigError, Exit
from adl_dist.report.runs import flatten
from adl_dist.schedule import METHODS, Method
from adl_dist.schedule.methods import REMOVED_OPTIONS, WAS_REMOVED

LAUNCHER = "hydra/launcher"
# Nodes that name a callable and hold its arguments, whatever these are.
OPEN_NODES = ("model", "data", "optimizer", "lr_schedule", "loss")
LISTS_KEYS = "adl-dist train --help lists all keys"
# In 0.4.0; older run folders name some of them.
REMOVED = ("runtime.cuda_graphs", "sweep.tune", *(f"method.{name}" for name in REMOVED_OPTIONS))

Plain = dict[str, Any]


@dataclass(kw_only=True)
class SweepConfig:
    """``sweep.*``, which only several runs have; see conf/experiment/compare.yaml."""

    jobs: int | None = None
    variants: dict[str, list[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Composed(RunConfig):
    """What Hydra composes: a run, and which runs are asked for instead of it."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


ConfigStore.instance().store(name="schema", node=Composed)


def _vocab_size_next_to(path: str) -> int:
    from adl_dist.data.tokens import vocab_size_next_to  # imported late: torch takes seconds

    return vocab_size_next_to(path)


# What data.vocab_size is unless it is given; see conf/data/tokens.yaml.
OmegaConf.register_new_resolver("vocab_size_next_to", _vocab_size_next_to, replace=True)


class Parser(argparse.ArgumentParser):
    """An argparse parser that refuses as the project does: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line by a ConfigError."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists what it takes")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command, as after its help."""
        sys.stderr.write(message or "")
        raise Exit(status)


def config_folder() -> Path:
    """Return ``conf/``: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[2]
    return inside if (inside := package / "conf").is_dir() else package.parent / "conf"


def compose_run(overrides: Sequence[str]) -> tuple[RunConfig, Plain]:
    """Compose and check a run from Hydra overrides; return it, and the same as plain values for ``config.yaml``."""
    return checked(composed_of(overrides), overrides)


def checked(composed: DictConfig, overrides: Sequence[str]) -> tuple[RunConfig, Plain]:
    """Check what Hydra has made of ``overrides``, changing it; return what :func:`compose_run` does."""
    choices = composed.hydra.runtime.choices
    try:
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        config = OmegaConf.to_object(composed)
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, overrides)) from error
    assert isinstance(config, RunConfig)
    assert isinstance(plain, dict)
    method, K = config.method.chosen(), config.partition.num_stages
    if config.run_dir is None:
        data, model = named("data", config, choices), named("model", config, choices)
        config.run_dir = f"runs/{data}-{model}-{method.name}-k{K}-m{method.micro_batches_per_update}-seed{config.seed}"
    # Of the method's keys those that mean something to it, with what they stand for.
    plain |= {"method": method.settings, "run_dir": config.run_dir}
    return config, {str(key): value for key, value in plain.items() if key != "sweep"}


def known_run(run_dir: Path) -> RunConfig:
    """Return the configuration that a run folder was made with."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"run_dir={run_dir} is not a run folder: it has no config.yaml; train first, or correct the path"
        )
    try:
        settings = yaml.safe_load(file.read_text())
        for node, _, name in (key.partition(".") for key in REMOVED):
            dict(settings).get(node, {}).pop(name, None)
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), settings)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not the configuration of a run made by the command line: {error}") from error
    assert isinstance(config, RunConfig)
    config.init_from = None  # its checkpoints hold what became of that
    return config


def without_method_and_cut(words: Sequence[str]) -> list[str]:
    """Return those of ``words`` that choose neither a method nor where the model is cut, as who chooses these needs."""
    from adl_dist.checkpoint.run_dir import CUT  # imported late: torch takes seconds

    former = "partition.grain="
    keys = ("method", "partition=", former, *(f"partition.{name}=" for name in CUT))
    return [word for word in words if not word.lstrip("+~").startswith(keys)]


def method_words(method: Method) -> list[str]:
    """Return the arguments of a command line that make ``method``."""
    usual = {**Method(name=method.name).settings, "accumulation_steps": None}
    special = {key: value for key, value in method.settings.items() if usual.get(key) != value}
    return [f"method={method.name}", *(f"method.{key}={json.dumps(value)}" for key, value in special.items())]


def balance_word(begins: Sequence[str]) -> str:
    """Return the argument of a command line that lets stages 1..K-1 begin at these units."""
    plain = re.compile(r"[A-Za-z_][\w.]*")  # others could be read as numbers
    return f"partition.balance=[{','.join(n if plain.fullmatch(n) else json.dumps(n) for n in begins)}]"


def method_named(name: str, config: RunConfig, *, flag: str) -> Method:
    """Return the method ``name`` next to the configured one: with the configured M, unless it is one that has none."""
    if name not in METHODS:
        raise ConfigError(f"{flag}: there is no method '{name}'; choose of {', '.join(METHODS)}")
    chosen = config.method.chosen()
    if name == chosen.name:
        return chosen
    steps = None if METHODS[name].accumulation_steps == 1 else chosen.accumulation_steps
    return Method(name=name, accumulation_steps=steps)


def composed_of(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra makes of ``overrides``, with its own node ``hydra``; nothing but the keys is checked."""
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose("config", overrides=_opened(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, overrides)) from error


def _opened(overrides: Sequence[str]) -> list[str]:
    """Let open nodes take any key, and start from an empty node where a new ``_target_`` is given."""
    overrides = [each.replace("partition.grain=", "partition.granularity=", 1) for each in overrides]  # its former name
    parsed = [parse(text) for text in overrides]
    chosen = {override.key_or_group for override in parsed if not isinstance(override.value(), dict)}
    opened: list[str] = []
    for text, override in zip(overrides, parsed, strict=True):
        node, _, rest = override.key_or_group.partition(".")
        if node not in OPEN_NODES:
            text = text.lstrip("+")  # what Hydra would add there, no one would read
        elif rest == "_target_" and node != "loss" and node not in chosen:
            opened.insert(0, f"{node}=custom")
        is_free = (node in OPEN_NODES and rest) or override.key_or_group.startswith("sweep.variants.")
        if is_free and not override.is_delete() and not text.startswith("+"):
            text = f"++{text}"
        opened.append(text)
    return opened


def parse(text: str, *, several: bool = False) -> Override:
    """Read one override, with Hydra's grammar."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"'{text}' cannot be read; write KEY=VALUE, like train.epochs=2, and quote a VALUE that holds "
            "brackets, commas or spaces: \"run_dir='a, b'\""
        ) from error
    key = override.key_or_group
    if not key:
        raise ConfigError(f"'{text}' names no key; write KEY=VALUE, like train.epochs=2")
    if override.is_sweep_override():
        if several:
            return override
        raise ConfigError(
            f"{text} gives several values, but one command is one run; add --multirun to run them all; a list is "
            f"written {key}=[1,2]"
        )
    if key == "method.name":
        raise ConfigError(f"{text}: choose a method by method=NAME, which brings its settings along")
    is_of_hydra = re.split(r"[./]", key)[0] == "hydra" and text not in ("hydra.mode=RUN", "hydra.mode=MULTIRUN")
    if is_of_hydra and not is_of_launcher(key):
        raise ConfigError(f"there is no key '{key}'; {LISTS_KEYS}")
    if (config_folder() / key).is_dir() and not override.is_delete() and not isinstance(override.value(), str | dict):
        raise ConfigError(f"{text} is no choice of {key}; choose one of {_choices(key)}")
    return override


def is_of_launcher(key: str) -> bool:
    """Whether a key is about the launcher of Hydra that starts the runs of a sweep."""
    return key == LAUNCHER or key.startswith("hydra.launcher.")


def named(node: str, config: Any, choices: Mapping[str, str]) -> str:
    """Return what folders call the choice of ``node``: with its ``name`` if a target makes many."""
    if node not in choices:
        raise ConfigError(f"~{node} takes the whole of {node} away, which no run can do without; choose another one")
    choice, chosen = choices[node], getattr(config, node)
    if choice == "custom":
        choice = str(chosen["_target_"]).rpartition(".")[2]
    return f"{choice}-{chosen['name']}" if "name" in chosen else choice


def _choices(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (config_folder() / group).glob("*.yaml")))


def readable(error: Exception, overrides: Sequence[str]) -> str:
    """Return what Hydra or OmegaConf say about ``overrides``, in one line."""
    text = str(error)
    if match := re.search(r"Could not override '([^']*)'", text):
        # Of a whole node, like runtime={a: 1}, only the cause knows the key; of an unknown node it knows less.
        key = max(match[1], getattr(error.__cause__, "full_key", None) or "", key=len)
        if key in REMOVED:
            return f"{key} {WAS_REMOVED}"
        return f"there is no key '{key}'{_did_you_mean(key)}; {LISTS_KEYS}"
    if match := re.search(r"Could not find '([^']*)'", text):
        if match[1] == "optimizer/rotated":
            own = "optimizer._target_=rotated_adam.RotatedAdam in the folder of examples/rotated_adam.py"
            return f"optimizer=rotated was removed in 0.4.0; use {own}, or version 0.3.8"
        group, _, name = match[1].rpartition("/")
        if group == LAUNCHER:
            extra = "pip install -c constraints.txt -e '.[slurm]' in the checkout"
            return f"there is no {group}={name}; the submitit launchers come by {extra}"
        known = f"; choose one of {_choices(group)}" if group and _choices(group) else ""
        known += _of_torchvision(name) if group == "model" else ""
        return f"there is no {group}={name}{known}" if group else f"there is no configuration '{match[1]}'"
    if isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    full_key = getattr(error, "full_key", None)
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if not full_key:
        return first
    if "Missing mandatory value" in text:
        source = re.search(r"resolving interpolation: Missing mandatory value: (\S+)", text)
        missing = source[1] if source else full_key  # a key that it is taken from, or it itself
        return f"{missing} must be given: add {missing}=VALUE"
    if match := re.search(r"Interpolation key '(data\.[^']*)' not found", text):
        return (
            f"{full_key} is taken from {match[1]}, which there is not with these data; choose data and a model that go "
            f"together, as model=gpt and data=tokens do, or give {full_key}=VALUE"
        )
    first = re.sub(r"^\w+ raised while resolving interpolation: ", "", first)  # what a resolver of ours says
    if "resolving interpolation" in text:
        return first
    of_key = [each for each in overrides if each.lstrip("+").startswith(f"{full_key}=")]
    named = [each for each in of_key if f"'{each.partition('=')[2]}'" in first]  # of several, the one that is wrong
    culprit = [full_key, *of_key, *named][-1]
    return f"{culprit}: {first.removeprefix(f'Error merging override {full_key}').strip()}"


def _of_torchvision(name: str) -> str:
    """Return how to get a model of torchvision's that is called ``name``; empty if there is none."""
    from torchvision.models import list_models  # imported late: it takes a second

    close = difflib.get_close_matches(name, list_models(), n=1)
    if not close:
        return ""
    return f"; torchvision has {close[0]}: model=torchvision model.name={close[0]}"


def _did_you_mean(key: str) -> str:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        base: Any = OmegaConf.to_container(compose("config"), resolve=False)
    leaves = ["sweep.variants", *flatten(base)]  # which is empty
    nodes = {node for leaf in leaves for node in accumulate(leaf.split("."), "{}.{}".format)}
    known = sorted(node for node in nodes if not key.startswith(f"{node}."))
    # The whole name, or failing that the last part under the same or another node.
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        tails = {name.rpartition(".")[2]: name for name in known}
        close = [tails[t] for t in difflib.get_close_matches(key.rpartition(".")[2], tails, n=1)]
    return f"; did you mean '{close[0]}'?" if close else ""


def print_keys(overrides: Sequence[str] = ()) -> None:
    """Print every key with what it is after ``overrides``; without any, its default."""
    composed = composed_of(words := [*overrides, "hydra.mode=RUN"])
    unresolved: Any = OmegaConf.to_container(composed, resolve=False, enum_to_str=True)
    try:
        _, plain = checked(composed, words)
    except ConfigError:  # a value is missing, ???, which these keys are asked for to learn of
        plain = {key: value for key, value in unresolved.items() if key not in ("hydra", "sweep")}
    after = f"after {' '.join(overrides)}" if overrides else "by default"
    groups = sorted(path.name for path in config_folder().iterdir() if path.is_dir())
    sys.stdout.write(
        f"Keys and what they are {after} (KEY=VALUE changes one; nested keys are joined by dots):\n\n"
        f"{yaml.safe_dump(plain, sort_keys=False)}\nGroups (GROUP=CHOICE):\n"
        + "".join(f"  {group:<12}{_choices(group)}\n" for group in groups)
        + "\nadl-dist train --multirun KEY=A,B ... runs all combinations and compares them.\n"
    )
