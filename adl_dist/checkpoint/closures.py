"""What functions keep between two calls: the variables of their closures, and the attributes of objects called.

Hooks of an optimizer are such functions, and so is a loss. What one of them moves is state of the run, as what an
optimizer moves is.
"""

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.checkpoint import nested

HOOKS = {"pre": "_optimizer_step_pre_hooks", "post": "_optimizer_step_post_hooks"}
HOOK = "hook."  # begins the names of what hooks keep
Mark = str | list[str]
Place = tuple[Any, Any]  # what holds a value, like a dictionary, and by which key


class Cell:
    """The variable of a closure, to be read and set by a key, its name."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


class Slots:
    """The attributes of an object that are in no dictionary, to be read and set by a key, their name."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)


def hooks_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the functions that are called with each step of an optimizer, each by a name that the next run gives it."""
    for when, key in HOOKS.items():
        for number, hook in enumerate(getattr(optimizer, key, {}).values()):
            yield f"{HOOK}{when}{number}.{_name(hook)}", hook
    if "step" in vars(optimizer):  # wrapped, by a schedule or by the user
        yield f"{HOOK}step", vars(optimizer)["step"]


def places(name: str, function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Place]]:
    """Yield the places of what ``function`` keeps, by names that begin with its own; no two have the same."""
    taken = set[str]()
    for full, place in _places(name, function, set() if seen is None else seen):
        while full in taken:  # a variable of the closure and an attribute of the function, for example
            full += "'"
        taken.add(full)
        yield full, place


def _places(name: str, function: Any, seen: set[int]) -> Iterator[tuple[str, Place]]:
    if id(function) in seen or isinstance(function, Optimizer | nn.Module | type):
        return
    seen.add(id(function))
    if isinstance(function, MethodType):
        yield from _places(name, function.__self__, seen)
        yield from _places(name, function.__func__, seen)
    elif isinstance(function, partial):
        yield from _places(name, function.func, seen)
        for number, value in enumerate(function.args):
            yield from _of_value(f"{name}[{number}]", value, (function.args, number), seen)
        for key, value in function.keywords.items():
            yield from _of_value(f"{name}.{key}", value, (function.keywords, key), seen)
    elif isinstance(function, FunctionType):
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            if id(cell) not in seen:
                seen.add(id(cell))
                yield from _of_value(f"{name}.{key}", value, (Cell(cell), key), seen)
        for key, value in vars(function).items():
            yield from _of_value(f"{name}.{key}", value, (vars(function), key), seen)
    else:
        for key, value in getattr(function, "__dict__", {}).items():
            yield from _of_value(f"{name}.{key}", value, (function.__dict__, key), seen)
        for key in (key for owner in type(function).__mro__ for key in _slots(owner) if hasattr(function, key)):
            yield from _of_value(f"{name}.{key}", getattr(function, key), (Slots(function), key), seen)


def put(place: Place, value: Any) -> None:
    """Give a place another value: in place if that can be, because others may hold it, too."""
    home, key = place
    present = home[key]
    are_tensors = isinstance(present, Tensor) and isinstance(value, Tensor)
    if are_tensors and (present.shape, present.dtype) == (value.shape, value.dtype):
        present.data.copy_(value)
    elif isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    else:
        home[key] = value


def mark(value: Any) -> Mark:
    """Return what shows later, by :func:`has_moved`, whether ``value`` is another one."""
    return [*map(nested.mark, value)] if type(value) is list else nested.mark(value)


def has_moved(before: Mark | None, value: Any) -> bool:
    """Whether ``value`` is another one than that of the mark ``before``; None: there was none.

    A list to which something was only appended is a record, and not: it belongs to the process that writes it.
    """
    if isinstance(before, list) and type(value) is list:
        return [*map(nested.mark, value[: len(before)])] != before
    return before != mark(value)


def _slots(owner: type) -> list[str]:
    named = vars(owner).get("__slots__", ())
    private = f"_{owner.__name__.lstrip('_')}"  # begins a name of two underscores, as Python has it
    names = [named] if isinstance(named, str) else [*named]
    names = [f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _of_value(name: str, value: Any, place: Place, seen: set[int]) -> Iterator[tuple[str, Place]]:
    if isinstance(value, FunctionType | MethodType | partial):
        yield from _places(name, value, seen)
    else:
        yield name, place


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")
