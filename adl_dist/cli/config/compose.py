"""Composition and checks of a :class:`RunConfig` from a command line."""

import argparse
import contextlib
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adl_dist.checkpoint.storage import place_of, read
from adl_dist.cli.config.schema import GROUPS, OPEN_NODES, RunConfig, defaults, keys_of
from adl_dist.distributed.procfs import started_at
from adl_dist.errors import ConfigError, Exit, did_you_mean
from adl_dist.report import tell
from adl_dist.report.runs import flatten
from adl_dist.schedule import METHODS, Method
from adl_dist.settings import REMOVED_OPTIONS, RENAMED, WAS_REMOVED, renamed

LAUNCHER = "hydra/launcher"
PATHS = {"root", "train", "validation"}  # keys of our own datasets
RESOLVERS = (
    "understood are ${KEY}, ${now:%H%M}, ${oc.env:NAME}, ${oc.env:NAME,DEFAULT}, ${oc.decode:TEXT} and "
    "${oc.select:KEY,DEFAULT}"
)
HOW_TO_WRITE = (
    "write KEY=VALUE, like train.epochs=2, and quote a VALUE that holds brackets, commas, spaces, =, ~, letters other "
    "than a to z or resolvers in resolvers: \"run_dir='a, b'\", "
    "\"sweep.variants.stale=['method=adl','method.weights=latest']\", \"seed='${oc.decode:${oc.env:SEED}}'\""
)
LISTS_KEYS = "adl-dist train --help lists all keys"
# In 0.4.0; older run folders name some of them.
REMOVED = ("runtime.cuda_graphs", "sweep.tune", *(f"method.{name}" for name in REMOVED_OPTIONS))
SWEEP: dict[str, tuple[Any, str]] = {  # which only several runs have; see conf/experiment/compare.yaml
    "jobs": (None, "runs at the same time; null: one for each core, on a GPU one"),
    "variants": ({}, "settings of each row, by the name of its folder"),
}

Plain = dict[str, Any]

ConfigStore.instance().store(
    name="schema", node={**defaults(), "sweep": {key: default for key, (default, _) in SWEEP.items()}}
)


def _vocab_size_next_to(path: str, model_config: str | None = None) -> int:
    from adl_dist.data.tokens import vocab_size_next_to  # imported late: torch takes seconds

    try:
        return vocab_size_next_to(path)
    except ConfigError:
        if model_config is None:
            raise
    from adl_dist.models.from_transformers import read_config

    return int(read_config(model_config).get_text_config().vocab_size)


# The default of data.vocab_size; see conf/data/tokens.yaml.
OmegaConf.register_new_resolver("vocab_size_next_to", _vocab_size_next_to, replace=True)


class Parser(argparse.ArgumentParser):
    """An argparse parser with errors of one line and exit code 2.

    With ``overrides``, a help text, it also takes settings KEY=VALUE, and flags cannot be abbreviated.
    """

    def __init__(self, *, overrides: str | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=overrides is None, **options)
        if overrides is not None:
            self.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError about the command line."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists its arguments")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command by raising Exit, for example after its help."""
        sys.stderr.write(message or "")
        raise Exit(status)


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse ``type``: a number from ``least`` to ``most``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most and math.isfinite(kind(text)):
                return kind(text)
        name, end = "a whole number" if kind is int else "a number", "" if most == math.inf else f" and at most {most}"
        raise argparse.ArgumentTypeError(f"expected {name} of at least {least}{end}, got {text}")

    return read


def config_folder() -> Path:
    """Return the folder ``conf/`` of the package (wheel) or the checkout."""
    package = Path(__file__).parents[2]
    return inside if (inside := package / "conf").is_dir() else package.parent / "conf"


def compose_run(overrides: Sequence[str]) -> tuple[RunConfig, Plain]:
    """Return a run's checked configuration, and the same as plain values."""
    return checked(composed_of(overrides), overrides)


def checked(composed: DictConfig, overrides: Sequence[str]) -> tuple[RunConfig, Plain]:
    """Check a composition; return its configuration, also as plain values."""
    choices = composed.hydra.runtime.choices
    config = RunConfig.of({k: v for k, v in resolved(composed, overrides).items() if k != "sweep"})
    plain = config.plain
    if config.run_dir is None:
        data, model = named("data", config, choices), named("model", config, choices)
        method, K = config.method, config.partition.num_stages
        config.run_dir = f"runs/{data}-{model}-{method.name}-k{K}-m{method.micro_batches_per_update}-seed{config.seed}"
        plain["run_dir"] = config.run_dir
    for name in ("resume", "init_from"):  # a mistaken path is shown as it is
        if (path := getattr(config, name)) is not None and Path(path).exists():
            setattr(config, name, str(place_of(path)))
    if str(config.data.get("_target_", "")).startswith("adl_dist."):
        config.data |= {key: str(Path(config.data[key]).expanduser().absolute()) for key in PATHS & config.data.keys()}
    return config, plain


def with_values(words: Sequence[str], plain: Plain) -> list[str]:
    """Replace interpolations in ``words`` by their values in ``plain``.

    A process started later could resolve them differently, for example the time.
    """
    settings = flatten(plain)
    keys = {word: parse(word).key_or_group for word in words if "${" in word}
    return [f"{keys[w]}={json.dumps(settings[keys[w]])}" if keys.get(w) in settings else w for w in words]


def resolved(composed: DictConfig, overrides: Sequence[str]) -> Plain:
    """Resolve all interpolations of a composition, without Hydra's own node.

    ``${now:...}`` is the start time of this process, or of its torchrun, so that a restart gets the same time.
    """
    start = started_at(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    OmegaConf.register_new_resolver("now", datetime.fromtimestamp(start).strftime, replace=True)
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        plain = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error, overrides, composed.hydra.runtime.choices)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def known_run(run_dir: PurePath) -> RunConfig:
    """Return the configuration of a command-line run from its folder."""
    plain, file = content_of(run_dir), run_dir / "config.yaml"
    if is_of_script(plain):
        raise ConfigError(
            f"{run_dir} is the run of a script, so its model is not known here; add model._target_=MODULE.FUNCTION, "
            "which makes it, or model=NAME; evaluate and generate take its data in the same way"
        )
    try:
        for group in GROUPS:
            new = renamed({f"{group}.{key}": value for key, value in plain[group].items()})
            plain[group] = {key.partition(".")[2]: value for key, value in new.items() if key not in REMOVED}
        plain["train"].setdefault("clip_scope", "stage")  # before 0.4.0 the only one
        config = RunConfig.of(plain)
    except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"{file} is not the configuration of a run: {error}") from error
    config.init_from = None  # which the run's checkpoints have replaced
    return config


def content_of(run_dir: PurePath) -> Plain:
    """Return the content of a run folder's config.yaml."""
    file = run_dir / "config.yaml"
    try:
        return dict(yaml.safe_load(read(file)))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"run_dir={run_dir} is not a run folder: it has no config.yaml; train first, or correct the path"
        ) from None
    except (yaml.YAMLError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not the configuration of a run: {error}") from error


def is_of_script(plain: Plain) -> bool:
    """Return whether a config.yaml is a script's, without model and data."""
    return "partition" not in plain and "num_stages" in plain


def run_of_script(plain: Plain, words: Sequence[str]) -> RunConfig:
    """Return the configuration of a script's run, with ``words`` added.

    ``plain`` is the script's config.yaml, which gives seed, dtype, batch size, M and the handling of ties. ``words``
    are overrides that choose the model and the data.
    """
    kept = {key: plain[key] for key in ("seed", "dtype")}
    kept |= {"train.batch_size": plain["batch_size"], "partition.tied": plain.get("tied", "share")}
    kept["method.accumulation_steps"] = plain["method"]["accumulation_steps"]
    return compose_run([*(f"{key}={value}" for key, value in kept.items()), *words])[0]


def without_method_and_cut(words: Sequence[str]) -> list[str]:
    """Return ``words`` without those that choose a method or a cut."""
    from adl_dist.checkpoint.run_dir import CUT  # imported late: torch takes seconds

    keys = ("method", "partition=", *(f"partition.{name}=" for name in CUT))
    return [word for word in renamed_words(words) if not word.lstrip("+~").startswith(keys)]


def method_words(method: Method) -> list[str]:
    """Return the command-line words that choose ``method`` and its settings."""
    usual = {**Method(name=method.name).settings, "accumulation_steps": None}
    special = {key: value for key, value in method.settings.items() if usual.get(key) != value}
    return [f"method={method.name}", *(f"method.{key}={json.dumps(value)}" for key, value in special.items())]


def balance_word(begins: Sequence[str]) -> str:
    """Return ``partition.balance=[...]`` for stages that begin at ``begins``."""
    plain = re.compile(r"[A-Za-z_][\w.]*")  # others could be read as numbers
    return f"partition.balance=[{','.join(n if plain.fullmatch(n) else json.dumps(n) for n in begins)}]"


def method_named(name: str, config: RunConfig, *, flag: str) -> Method:
    """Return the method ``name``, with the configured M if it accumulates."""
    if name not in METHODS:
        raise ConfigError(f"{flag}: there is no method '{name}'; choose one of {', '.join(METHODS)}")
    if name == config.method.name:
        return config.method
    steps = None if METHODS[name].accumulation_steps == 1 else config.method.accumulation_steps
    return Method(name=name, accumulation_steps=steps)


def composed_of(overrides: Sequence[str]) -> DictConfig:
    """Compose ``overrides``, including Hydra's node; check only their keys."""
    overrides = renamed_words(overrides)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose("config", overrides=_opened(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error, overrides)) from error


def renamed_words(words: Sequence[str]) -> list[str]:
    """Return ``words`` with present names; rank 0 prints each change."""
    new = []
    for word in words:
        key, equals, value = word.partition("=")
        if (old := key.lstrip("+~")) in RENAMED:
            name, values = RENAMED[old]
            for was, present in values.items():
                value = re.sub(rf"\b{was}\b", present, value)
            word = key.replace(old, name) + equals + value
            if os.environ.get("RANK", "0") == "0":
                tell(sys.stderr, f"adl-dist: {old} is called {name} since 0.4.0; read as {word}\n")
        new.append(word)
    return new


def _opened(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` in the form that Hydra takes.

    Open nodes take any key. A new ``_target_`` begins with an empty node.
    """
    parsed = [parse(text) for text in overrides]
    chosen = {override.key_or_group for override in parsed if not isinstance(override.value(), dict)}
    opened: list[str] = []
    for text, override in zip(overrides, parsed, strict=True):
        node, _, rest = override.key_or_group.partition(".")
        if node not in OPEN_NODES:
            text = text.lstrip("+")  # Hydra would add an unknown key
        elif rest == "_target_" and node != "loss" and node not in chosen:
            opened.insert(0, f"{node}=custom")
        is_free = (node in OPEN_NODES and rest) or override.key_or_group.startswith("sweep.variants")
        if is_free and not override.is_delete() and not text.startswith("+"):
            text = f"++{text}"
        opened.append(text)
    return opened


def parse(text: str, *, several: bool = False) -> Override:
    """Parse one override; check its key and choice.

    Raise ConfigError if it is wrong, or has several values without ``several``.
    """
    if text.startswith("--"):
        name, _, value = text.lstrip("-").partition("=")
        raise ConfigError(f"unknown option --{name}{_did_you_mean(name, value and f'={value}')}; {LISTS_KEYS}")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"'{text}' cannot be read; {HOW_TO_WRITE}") from error
    key = override.key_or_group
    if not key:
        raise ConfigError(f"'{text}' names no key; write KEY=VALUE, like train.epochs=2")
    if key == "method.name":
        raise ConfigError(f"{text}: choose a method by method=NAME, which brings its settings along")
    is_sweep = override.is_sweep_override()
    if is_sweep and not several:
        raise ConfigError(
            f"{text} gives several values, but this command takes one; `adl-dist train --multirun` runs all, and a "
            f"list, where {key} takes one, is written {key}=[1,2]"
        )
    chosen: Any = None if is_sweep else override.value()
    _check_keys([f"{key}.{one}" for one in chosen] if isinstance(chosen, dict) and key in GROUPS else [key])
    if (config_folder() / key).is_dir() and not (is_sweep or override.is_delete() or isinstance(chosen, dict)):
        if not isinstance(chosen, str):
            raise ConfigError(f"{text} is not a choice of {key}; choose one of {_choices(key)}")
        if not (config_folder() / key / f"{chosen}.yaml").is_file():
            raise ConfigError(_unknown_choice(key, chosen))
    return override


def _check_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError for an unknown key outside of the open nodes."""
    for key in keys:
        if key in REMOVED:
            raise ConfigError(f"{key} {WAS_REMOVED}")
        is_open = key.partition(".")[0] in OPEN_NODES or key.startswith("sweep.variants") or is_of_launcher(key)
        if not is_open and key not in _known_keys() and not (config_folder() / key).is_dir():
            raise ConfigError(f"there is no key '{key}'{_did_you_mean(key)}; {LISTS_KEYS}")


def _known_keys() -> list[str]:
    return [
        *(f"{group}.{key}" for group in GROUPS for key in keys_of(group)),
        *(*keys_of(""), *OPEN_NODES, *GROUPS, "sweep", "sweep.jobs", "sweep.variants", "hydra.mode"),
    ]


def is_of_launcher(key: str) -> bool:
    """Return whether a key belongs to the Hydra launcher of a sweep."""
    return key == LAUNCHER or key.startswith("hydra.launcher.")


def named(node: str, config: Any, choices: Mapping[str, str]) -> str:
    """Return the choice of ``node`` as a part of a run folder's name.

    A ``name`` in the node is appended, as in ``torchvision-resnet50``.
    """
    if node not in choices:
        raise ConfigError(f"~{node} removes {node}, which every run needs; choose another one")
    choice, chosen = choices[node], getattr(config, node)
    if choice == "custom":
        choice = str(chosen["_target_"]).rpartition(".")[2]
    return f"{choice}-{chosen['name']}" if "name" in chosen else choice


def _choices(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (config_folder() / group).glob("*.yaml")))


def readable(error: Exception, overrides: Sequence[str], choices: Mapping[str, str] | None = None) -> str:
    """Return one line on an error of Hydra or OmegaConf about ``overrides``."""
    if match := re.search(rf"Could not find '{LAUNCHER}/([^']*)'", str(error)):
        extra = "pip install -c constraints.txt -e '.[slurm]' in the checkout"
        return f"there is no {LAUNCHER}={match[1]}; the submitit launchers come by {extra}"
    if match := re.search(r"Could not override '([^']*)'", str(error)):  # in data={foo: 1} only the cause knows foo
        key = max(match[1], getattr(error.__cause__, "full_key", None) or "", key=len)
        return f"there is no key '{key}'{_did_you_mean(key)}; {LISTS_KEYS}"
    error = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, text = getattr(error, "full_key", None) or "", str(error)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    if "Missing mandatory value" in text:
        source = re.search(r"resolving interpolation: Missing mandatory value: (\S+)", text)
        missing = source[1] if source else key  # a key that it is taken from, or it itself
        return f"{missing} must be given: add {missing}=VALUE"
    if match := re.search(r"Interpolation key 'data\.([^']*)' not found", text):
        data, other = (f"{name}={(choices or {}).get(name, 'custom')}" for name in ("data", key.partition(".")[0]))
        return f"{data} has no {match[1]}, which {other} needs; give {key}=VALUE, or choose another data"
    if "Unsupported interpolation type" in text or "HydraConfig was not set" in text:
        return f"{first}; {RESOLVERS}"
    if "resolving interpolation" in text:
        return re.sub(r"^\w+ raised while resolving interpolation: ", "", first)  # from a resolver of ours
    return f"{next((each for each in overrides if each.lstrip('+').startswith(f'{key}=')), key)}: {first}".lstrip(": ")


def _unknown_choice(group: str, name: str) -> str:
    """Return the message for an unknown choice of a group."""
    if (group, name) == ("optimizer", "rotated"):
        own = "optimizer._target_=rotated_adam.RotatedAdam in the folder of examples/rotated_adam.py"
        return f"optimizer=rotated was removed in 0.4.0; use {own}, or version 0.3.8"
    known = f"{did_you_mean(name, _choices(group).split(', '))}; choose one of {_choices(group)}"
    if group == "model":
        from torchvision.models import list_models  # imported late: it takes a second

        if close := difflib.get_close_matches(name, list_models(), n=1):
            known += f"; torchvision has {close[0]}: model=torchvision model.name={close[0]}"
    if group in OPEN_NODES:
        own = "torch.optim.NAME, or MODULE.NAME of yours" if group == "optimizer" else "MODULE.NAME"
        known += f"; any other: {group}._target_={own}"
    return f"there is no {group}={name}{known}"


def _did_you_mean(key: str, value: str = "") -> str:
    """Return a hint at the most similar key, as a whole or by its last part."""
    known = {name: name for name in sorted(_known_keys()) if not key.startswith(f"{name}.")}
    tails = {name.rpartition(".")[2]: name for name in known} | dict.fromkeys(("lr", "learning_rate"), "optimizer.lr")
    tail = key.rpartition(".")[2]
    close = [tails[tail]] if tail in tails else [known[one] for one in difflib.get_close_matches(key, known, n=1)]
    if not close:
        close = [tails[one] for one in difflib.get_close_matches(tail, tails, n=1)]
    return f"; did you mean '{close[0]}{value}'?" if close else ""


def print_keys(overrides: Sequence[str] = ()) -> None:
    """Print every key with its help, and its default or overridden value."""
    words = [*overrides, "hydra.mode=RUN"]
    composed = composed_of(words)
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    try:
        _, plain = checked(composed, words)
    except ConfigError:  # a value is missing, ???, of which this help is to tell
        plain = {key: value for key, value in plain.items() if key not in ("hydra", "sweep")}
    after = f"after {' '.join(overrides)}" if overrides else "by default"
    groups = sorted(path.name for path in config_folder().iterdir() if path.is_dir())
    sys.stdout.write(
        f"Keys and their values {after} (KEY=VALUE changes one; nested keys are joined by dots):\n\n"
        + "\n".join(_documented(plain, composed.hydra.runtime.choices))
        + "\n\nGroups (GROUP=CHOICE):\n"
        + "".join(f"  {group:<12}{_choices(group)}\n" for group in groups)
        + "\nadl-dist train --multirun KEY=A,B ... runs all combinations and compares them. Its own keys:\n"
        + "".join(f"  {_line(f'sweep.{key}', default, text)}\n" for key, (default, text) in SWEEP.items())
    )


def _documented(plain: Plain, choices: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the help, one for each key with its value."""
    alone = {key: f.metadata["help"] for key, f in keys_of("").items()}
    for name, node in plain.items():
        if name not in (*GROUPS, *OPEN_NODES):
            yield _line(name, node, alone[name])
            continue
        helps = {key: f.metadata["help"] for key, f in keys_of(name).items()} if name in GROUPS else {}
        helps |= comments_of(config_folder() / name / f"{choices.get(name)}.yaml")
        yield _line(name, None, helps.get("", "")).replace(": null", ":", 1)
        for key, value in node.items():
            yield "  " + _line(key, value, helps.get(key, ""))


def _line(key: str, value: Any, text: str) -> str:
    shown = value if isinstance(value, str) and value else json.dumps(value)
    return f"{key}: {shown}  # {text}" if text else f"{key}: {shown}"


def comments_of(path: Path) -> dict[str, str]:
    """Return the comments of a ``conf/`` file by key; ``""`` is the top one."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [(match[1], match[2]) for line in lines if (match := re.match(r"(?:(\w+):[^#]*)?# (.*)", line))]
    comments = {key: text for key, text in found if key is not None}
    return comments | {"": " ".join(text for key, text in found if key is None)}
