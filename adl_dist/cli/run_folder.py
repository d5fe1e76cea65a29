"""The arguments of commands that take a run folder. No torch."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath

from adl_dist.checkpoint.storage import place_of
from adl_dist.errors import ConfigError

OF_MODEL = ("model", "data", "loss")  # the groups that describe a model and its data


def named_folder(
    command: str, arguments: Sequence[str], takes: Collection[str] = (), *, groups: Collection[str] = ()
) -> tuple[PurePath, dict[str, str], list[str]]:
    """Return the run folder, the other ``KEY=VALUE`` of ``arguments``, and settings.

    ``takes`` are the other keys. Settings are words like ``data.root=images`` of the ``groups`` that the command takes.

    Raises:
        ConfigError: If there is not exactly one folder, or an unknown argument.
    """
    more = f"adl-dist {command} --help lists its arguments"
    folders, options, settings = list[str](), dict[str, str](), list[str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in takes:
            options[key] = value
        elif equals and key.lstrip("+~").partition(".")[0] in groups:
            settings.append(argument)
        elif equals and key == "run_dir":
            folders.append(value)
        elif argument.startswith("-") or (equals and not Path(argument).is_dir()):
            raise ConfigError(f"adl-dist {command} does not know '{argument}'; {more}")
        else:
            folders.append(argument)
    if len(folders) != 1 or not folders[0]:
        raise ConfigError(f"adl-dist {command} takes one run folder, got '{' '.join(folders)}'; {more}")
    return place_of(folders[0]), options, settings


def wants_averages(options: Mapping[str, str]) -> bool:
    """Return whether ``ema=true`` asks for the moving averages of the weights."""
    if (ema := options.get("ema", "false").lower()) not in ("true", "false"):
        raise ConfigError(f"ema={options['ema']}: expected true or false")
    return ema == "true"
