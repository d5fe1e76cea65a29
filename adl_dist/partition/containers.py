"""Find and replace the tensors in arguments and results: in lists, tuples, dictionaries, dataclasses and slices."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), type)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)
    elif type(value) is slice:
        for one in (value.start, value.stop, value.step):
            _collect(one, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name, None), found)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace each tensor in ``value`` by ``function(tensor)``; containers in which nothing changes stay themselves."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        made = [map_tensors(function, one) for one in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)._make(made) if hasattr(value, "_make") else type(value)(made)
    if isinstance(value, dict):
        return _replaced(value, {key: map_tensors(function, one) for key, one in value.items()}, dict.__getitem__)
    if type(value) is slice:
        return slice(*(map_tensors(function, one) for one in (value.start, value.stop, value.step)))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return _replaced(value, {name: map_tensors(function, getattr(value, name)) for name in names}, getattr)
    return value


def _replaced(value: Any, entries: dict[Any, Any], get: Callable[[Any, Any], Any]) -> Any:
    """Return a shallow copy of a dictionary or dataclass with other ``entries``, or itself if none differs."""
    changed = {key: new for key, new in entries.items() if get(value, key) is not new}
    if not changed:
        return value
    made = copy.copy(value)
    for key, new in changed.items():
        if isinstance(made, dict):
            made[key] = new
        else:
            object.__setattr__(made, key, new)
    return made


def other_leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of ``value`` that are no tensors."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from other_leaves(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from other_leaves(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from other_leaves(getattr(value, field.name, None))
    elif not isinstance(value, Tensor):
        yield value
