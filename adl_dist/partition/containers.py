"""Search and replacement of leaves in containers and dataclasses."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), type)
_LEAVES = {bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device}  # looked at often


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in order."""
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif type(one) not in _LEAVES and (entries := _entries(one)) is not None:
            _collect(entries, found)


def unique_tensors(value: Any) -> list[Tensor]:
    """Return the distinct tensors in ``value``, in order."""
    return [*{id(tensor): tensor for tensor in tensors_in(value)}.values()]


def other_leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of ``value`` that are not tensors."""
    entries = _entries(value)
    if entries is not None:
        for one in entries:
            yield from other_leaves(one)
    elif not isinstance(value, Tensor):
        yield value


def _entries(value: Any) -> Any:
    """Return the entries of a container, or None for a leaf."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    if type(value) is slice:
        return value.start, value.stop, value.step
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return None


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace each tensor in ``value``, like :func:`map_leaves`."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def map_leaves(function: Callable[[Any], Any], value: Any, *, copies: bool = False) -> Any:
    """Replace each leaf of ``value`` by ``function(leaf)``.

    Containers in which nothing changes stay the same objects, unless ``copies`` is set.
    """
    if type(value) in _LEAVES or isinstance(value, Tensor) or (entries := _entries(value)) is None:
        return function(value)
    made = [map_leaves(function, one, copies=copies) for one in entries]
    if not copies and all(new is old for new, old in zip(made, entries, strict=True)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)._make(made) if hasattr(value, "_make") else type(value)(made)
    if type(value) is slice:
        return slice(*made)
    names = [*value] if isinstance(value, dict) else [field.name for field in fields(value)]
    twin = copy.copy(value)
    for name, new in zip(names, made, strict=True):
        if isinstance(twin, dict):
            twin[name] = new
        else:
            object.__setattr__(twin, name, new)
    return twin
