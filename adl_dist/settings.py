"""Settings as fields of dataclasses, with type, range and help. No torch."""

import contextlib
import math
import operator
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from adl_dist.errors import ConfigError
from adl_dist.wording import PYTHON_NAMES

T = TypeVar("T")

# Keys that have another name since 0.4.0, and their values that have one. The old names are accepted until 0.5.0.
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "method.lr_index": ("method.lr_clock", {"slot": "global"}),
    "partition.grain": ("partition.granularity", {}),
    "partition.speeds": ("partition.device_speeds", {}),
    "runtime.best_is": ("runtime.best_mode", {"highest": "max", "lowest": "min"}),
    "runtime.lazy": ("runtime.meta_init", {}),
    "runtime.memory": ("runtime.profile_memory", {}),
    "runtime.stall_seconds": ("runtime.watchdog_warn_seconds", {}),
    "runtime.abort_seconds": ("runtime.watchdog_abort_seconds", {}),
}
# Options of a method that were removed in 0.4.0, with their defaults; older run folders name them.
REMOVED_OPTIONS = {"buffer_size": 0, "buffer_reuse": None, "stage_speeds": None}
WAS_REMOVED = "was removed in 0.4.0; remove it, or use version 0.3.8"

NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
TYPED = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}
BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
PLURALS = {int: "whole numbers", float: "finite numbers", str: "names", Any: "entries"}


def setting(
    default: Any,
    text: str,
    *,
    key: str | None = None,
    expected: str | None = None,
    way_out: str = "",
    **bounds: float,
) -> Any:
    """Declare a field of a dataclass as a setting.

    Args:
        default: The default value.
        text: One line of help.
        key: The last part of its key on the command line; by default the name of the field.
        expected: The type as an error message names it; by default it follows from the annotation.
        way_out: Advice at the end of a message about a value out of range.
        bounds: The limits of the range, by the names in ``BOUNDS``.
    """
    limits = [(*BOUNDS[name], bound) for name, bound in bounds.items()]
    metadata = {"help": text, "key": key, "expected": expected, "way_out": way_out, "limits": limits}
    return field(default=default, metadata=metadata)


def settings_of(cls: type) -> dict[str, Field[Any]]:
    """Return the fields of ``cls`` that are settings, by last part of the key."""
    return {f.metadata["key"] or f.name: f for f in fields(cls) if "help" in f.metadata}


def documented(group: str, call: str | None = None) -> Callable[[type[T]], type[T]]:
    """Return a decorator that documents the settings of a ``group``.

    It adds the help of each setting to the docstring of a dataclass. Messages to scripts name a setting by ``call``,
    which is the class by default, instead of the setting's key.
    """

    def decorated(cls: type[T]) -> type[T]:
        lines = [f"    {f.name}: {f.metadata['help']}." for f in settings_of(cls).values()]
        cls.__doc__ = "\n".join([str(cls.__doc__).rstrip(), "", "Attributes:", *lines])
        for key, f in settings_of(cls).items():
            PYTHON_NAMES[f"{group}.{key}"] = call or cls.__name__, f.name
        return cls

    return decorated


def made_from(cls: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """Build a ``cls`` from settings by last key part and ``others`` by name."""
    return cls(**{f.name: values[key] for key, f in settings_of(cls).items()} | others)


def check_settings(obj: object, group: str) -> None:
    """Check types and ranges of a dataclass, and convert ints for floats.

    Args:
        obj: An instance of the dataclass.
        group: The first part of the keys, like ``runtime``; empty if keys have only one part.

    Raises:
        ConfigError: If a value has a wrong type or is out of range.
    """
    cls: Any = type(obj)
    hints = _type_hints(cls)
    for name, f in settings_of(cls).items():
        key, value, hint = f"{group}.{name}".lstrip("."), getattr(obj, f.name), hints[f.name]
        if not _fits(hint, value):
            check_choice(key, value, _choices(hint) or [value])
            raise ConfigError(f"{key} must be {f.metadata['expected'] or _described(hint)}, got {value!r}")
        for number in value if isinstance(value, list | tuple) else [value]:
            limits, way_out = f.metadata["limits"], f.metadata["way_out"]
            if type(number) in (int, float) and not all(holds(number, bound) for _, holds, bound in limits):
                bounds = " and ".join(f"{words} {bound}" for words, _, bound in limits)
                raise ConfigError(f"{key} must be {bounds}, got {number}{way_out and f'; {way_out}'}")
        if type(value) is int and float in (hint, *get_args(hint)) and int not in get_args(hint):
            object.__setattr__(obj, f.name, float(value))


def check_choice(key: str, value: object, choices: Sequence[Any]) -> None:
    """Raise ConfigError if ``value`` is not one of the ``choices``."""
    if value not in choices:
        words = ", ".join(choice or "null" for choice in choices)
        if isinstance(value, str):
            raise ConfigError(f"{key}: there is no '{value}'; choose one of {words}")
        raise ConfigError(f"{key} must be one of {words}, got {'null' if value is None else value}")


def as_typed(hint: Any, value: Any) -> Any:
    """Convert a command line value to its setting's type: '64' to 64."""
    parts = set(_parts(hint)) - {types.NoneType}
    if parts == {bool}:
        return TYPED.get(str(value).lower(), value)
    if parts == {str} and type(value) in (int, float):
        return str(value)
    for kind in (int, float):
        if isinstance(value, str) and kind in parts and str not in parts:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def renamed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an older version under their present dotted names."""
    new = dict(flat)
    for key in flat.keys() & RENAMED.keys():
        new[RENAMED[key][0]] = _present(key, new.pop(key))
    return new


def from_old_name(key: str, value: Any, *, stacklevel: int) -> Any:
    """Convert the value of a setting's old ``key`` to the present one; warn."""
    old, new = (each.rpartition(".")[2] for each in (key, RENAMED[key][0]))
    warnings.warn(f"{old} is called {new} since 0.4.0", DeprecationWarning, stacklevel=stacklevel + 1)
    return _present(key, value)


def _present(key: str, value: Any) -> Any:
    return RENAMED[key][1].get(value, value) if isinstance(value, str) else value


@cache
def _type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def _fits(hint: Any, value: object) -> bool:
    for part in _parts(hint):
        origin = get_origin(part)
        if part is Any:
            return True
        if origin is Literal:
            fits = isinstance(value, str) and value in get_args(part)
        elif origin is Sequence:
            fits = isinstance(value, list | tuple) and all(_fits(get_args(part)[0], one) for one in value)
        elif part is float:
            fits = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        else:
            fits = type(value) is part  # True is no whole number
        if fits:
            return True
    return False


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the words that a setting of type Literal accepts, otherwise ()."""
    parts = [part for part in _parts(hint) if part is not types.NoneType]
    return get_args(parts[0]) if len(parts) == 1 and get_origin(parts[0]) is Literal else ()


def _described(hint: Any) -> str:
    words: list[str] = []
    for part in _parts(hint):
        origin = get_origin(part)
        if part is types.NoneType:
            continue
        if origin is Literal:
            words += map(repr, get_args(part))
        else:
            words.append(f"a list of {PLURALS[get_args(part)[0]]}" if origin is Sequence else NAMES[part])
    return " or ".join(words)
