"""Finds what can be seen from modules, so that it can be compared with a copy, and put back.

Seen are parameters, buffers, plain tensors, generators, numbers and containers that a module reaches through its
attributes, through objects and containers in them, through class attributes of the user's own classes, and through the
closures of their methods; of a forward, a loss, and what these call by name, also the global variables. Not seen: what
objects and functions of a library keep, and what lives in an extension or in another process.
"""

import argparse
import copy
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adl_dist.memory import memory_of

MOST_ELEMENTS = 10_000  # a longer container holds data: its own elements are compared, but not looked into
LIBRARIES = {"torch", "numpy", "torchvision", "transformers", "timm", *sys.stdlib_module_names}
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CAN_CROSS = (*PLAIN, torch.dtype, torch.device, torch.Size)  # a cut, besides tensors, if it never changes
TENSORS = {"parameter", "buffer", "tensor"}
OF_TORCH = {*nn.Module().__dict__}  # what every module has: its registers, hooks, the mode; the rest is the user's
Key = Hashable
_MISSING = object()


@dataclass(frozen=True)
class Found:
    """One thing that a forward could move.

    Attributes:
        key: what it is recognised by where another module reaches it, too.
        look: returns its present value, or of many entries those that have changed.
    """

    key: Key
    place: str | Callable[[], list[str]]
    kind: str  # one of ``TENSORS``, ``generator`` or ``value``
    look: Callable[[], Any]
    has_changed: Callable[[], bool]
    restore: Callable[[], None]

    @property
    def names(self) -> list[str]:
        """What has changed, as the user would write it, for example ``layer1.calls[0]``."""
        return [self.place] if isinstance(self.place, str) else self.place()


class Walk:
    """Visits everything that is reached from modules, each object once; what holds comes before what is held."""

    def __init__(self, *, copies: dict[int, Tensor] | None, wanted: Callable[[Key], bool] = lambda key: True) -> None:
        """``copies`` of tensors, by their ids, that will do, and to add to; None: nothing is copied.

        ``wanted``: whether what has a key is to be found.
        """
        self.found: list[Found] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self._copies, self._wanted = copies, wanted
        self._seen: dict[int, Any] = {}  # with the objects, so that no address is used a second time

    def take_modules(self, root: nn.Module, prefix: str = "") -> None:
        """Look into ``root`` and all modules in it, called ``prefix``."""
        if id(root) in self._seen:  # and all in it: each child of a model may refer to it
            return
        modules = [(name, module) for name, module in root.named_modules(prefix=prefix) if self._is_new(module)]
        self.take_registered(modules)  # first, so that a tensor is called by the name it is registered under
        for name, module in modules:
            dot = f"{name}." if name else ""
            for held in (module._modules, module._parameters, module._buffers):
                self._take_entries(dot, held, look_into=False)
            self._take_entries(dot, module.__dict__, skip=OF_TORCH)
            for owner in type(module).__mro__:
                if not is_of_a_library(owner) and self._is_new(owner):
                    self._take_class(owner)

    def take_registered(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Take the parameters and buffers of ``modules``, each with its name, and of no other."""
        for name, module in modules:
            for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in held.items():
                    if tensor is not None:
                        self._take_tensor(f"{name}.{key}".lstrip("."), tensor, kind)

    def take_function(self, name: str, value: Any) -> None:
        """Look into a function, or any object that is called like one."""
        self.take(name, value)
        while isinstance(value, partial):
            value = value.func
        owner, is_function = type(value), isinstance(value, types.FunctionType | types.MethodType)
        if not is_function and not is_of_a_library(owner) and self._is_new(owner):
            self._take_class(owner)

    def _take_globals(self, function: types.FunctionType) -> None:
        """Look at the global variables that a function names, into functions that are the user's own, too."""
        known = function.__globals__
        for key in dict.fromkeys(_names_in(function.__code__)):
            value, name = known.get(key), f"global {key}"
            if isinstance(value, type):
                if not is_of_a_library(value) and self._is_new(value):
                    self._take_class(value)
            elif isinstance(value, types.FunctionType):
                self.take(key, value)
            elif key in known and not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
                self._take_place((id(known), key), name, partial(known.get, key), partial(known.__setitem__, key))
                self.take(name, value)

    def take(self, name: str, value: Any) -> None:
        """Look into a value, such as an attribute, a container or a closure holds."""
        if isinstance(value, PLAIN):
            return
        if isinstance(value, Tensor):
            self._take_tensor(name, value, "tensor")
        elif isinstance(value, nn.Module):
            self.take_modules(value, name)
        elif not self._is_new(value):
            return
        elif (access := generator_access(value)) is not None:
            get, put = access
            kept = copy.deepcopy(get())
            changed = lambda: repr(get()) != repr(kept)  # noqa: E731
            self._note(id(value), name, "generator", get, changed, lambda: put(copy.deepcopy(kept)))
        elif isinstance(value, np.ndarray):
            array = value.copy()
            changed, put_back = lambda: value.tobytes() != array.tobytes(), lambda: value.__setitem__(..., array)
            self._note(id(value), name, "value", lambda: value, changed, put_back)
        elif isinstance(value, dict):
            self._take_entries(name, value, form="{}[{!r}]")
        elif isinstance(value, list | deque | set | bytearray):
            self._take_container(name, value)
        elif isinstance(value, tuple | frozenset):
            self._take_elements(name, value)
        elif isinstance(value, types.MethodType):
            self.take(name, value.__self__)
            self.take(name, value.__func__)
        elif isinstance(value, partial):
            self.take(name, value.func)
            self._take_elements(name, value.args)
            self._take_entries(f"{name}.", value.keywords)
        elif isinstance(value, types.FunctionType):
            self._take_closure(name, value)
            if not is_of_a_library(value):
                self._take_entries(f"{name}.", vars(value))
                self._take_globals(value)
        elif isinstance(value, types.SimpleNamespace | argparse.Namespace) or not (
            isinstance(value, type | types.ModuleType) or is_of_a_library(type(value))
        ):
            self._take_object(name, value)

    def _take_tensor(self, name: str, tensor: Tensor, kind: str) -> None:
        if not self._is_new(tensor):
            return
        self.tensors.append((name, tensor))
        key = memory_of(tensor)
        if self._copies is None or tensor.is_meta or is_lazy(tensor) or not self._wanted(key):
            return
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor.detach().clone()
        kept = self._copies[id(tensor)]

        def has_changed() -> bool:
            return not _same_tensor(tensor.detach(), kept)

        def restore() -> None:
            if tensor.shape == kept.shape and tensor.dtype == kept.dtype:
                tensor.data.copy_(kept)
            else:
                tensor.data = kept.clone()

        self._note(key, name, kind, lambda: tensor, has_changed, restore)

    def _take_entries(
        self,
        name: str,
        held: dict[Any, Any],
        *,
        form: str = "{}{}",
        skip: Collection[Any] = (),
        look_into: bool = True,
    ) -> None:
        keys, values = [*held.keys()], [*held.values()]
        before = {key: value for key, value in zip(keys, values, strict=True) if key not in skip}

        def differing() -> list[Any]:
            if len(held) == len(keys) and all(map(is_, held.keys(), keys)) and all(map(is_, held.values(), values)):
                return []  # nearly always, and found fast
            now = {key: value for key, value in held.items() if key not in skip}
            return [k for k in {**before, **now} if not _is_same(now.get(k, _MISSING), before.get(k, _MISSING))]

        def restore() -> None:
            for key in differing():
                if key in before:
                    held[key] = before[key]
                else:
                    del held[key]

        def named() -> list[str]:
            return [form.format(name, key) for key in differing()]

        def look() -> dict[Any, Any]:
            return {key: held.get(key) for key in differing()}

        self._note(id(held), named, "value", look, lambda: bool(differing()), restore)
        if look_into and len(before) <= MOST_ELEMENTS:
            for key, value in before.items():
                self.take(form.format(name, key), value)

    def _take_class(self, owner: type) -> None:
        called = _called(owner)
        for key, value in vars(owner).items():
            name = f"{owner.__name__}.{key}"
            function = getattr(value, "__func__", value)  # of a static or class method
            if isinstance(function, types.FunctionType):
                self.take(name, function) if key in called else self._take_closure(name, function)
            elif not key.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                self._take_place((id(owner), key), name, partial(vars(owner).get, key), partial(setattr, owner, key))
                self.take(name, value)

    def _take_object(self, name: str, value: Any) -> None:
        if isinstance(held := getattr(value, "__dict__", None), dict):
            self._take_entries(f"{name}.", held)
        slots = [vars(owner).get("__slots__", ()) for owner in type(value).__mro__]
        for key in (key for group in slots for key in ([group] if isinstance(group, str) else group)):
            if not key.startswith("__") and hasattr(value, key):
                put = partial(object.__setattr__, value, key)
                self._take_place((id(value), key), f"{name}.{key}", partial(getattr, value, key, _MISSING), put)
                self.take(f"{name}.{key}", getattr(value, key))

    def _take_closure(self, name: str, function: types.FunctionType) -> None:
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._take_cell(f"{name}.{key}", cell)

    def _take_cell(self, name: str, cell: types.CellType) -> None:
        if self._is_new(cell):
            with suppress(ValueError):  # nothing is in it yet
                self._take_place(id(cell), name, lambda: cell.cell_contents, partial(setattr, cell, "cell_contents"))
                self.take(name, cell.cell_contents)

    def _take_place(self, key: Key, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        value = get()
        self._note(key, name, "value", get, lambda: not _is_same(get(), value), lambda: put(value))

    def _take_container(self, name: str, value: Any) -> None:
        before = copy.copy(value)

        def has_changed() -> bool:
            if isinstance(value, set):
                return bool(value != before)
            return len(value) != len(before) or not all(map(_is_same, value, before))

        def restore() -> None:
            value.clear()
            value.update(before) if isinstance(value, set) else value.extend(before)

        self._note(id(value), name, "value", lambda: value, has_changed, restore)
        self._take_elements(name, value)

    def _take_elements(self, name: str, elements: Collection[Any]) -> None:
        if len(elements) <= MOST_ELEMENTS and not isinstance(elements, bytearray):
            for place, element in enumerate(list(elements)):
                self.take(f"{name}[{place}]", element)

    def _note(
        self,
        key: Key,
        name: str | Callable[[], list[str]],
        kind: str,
        look: Callable[[], Any],
        has_changed: Callable[[], bool],
        restore: Callable[[], None],
    ) -> None:
        if self._copies is not None and self._wanted(key):
            self.found.append(Found(key, name, kind, look, has_changed, restore))

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


def values_of(value: Any, *, depth: int = 5) -> Any:
    """Return a copy of ``value`` that no later change reaches, to be compared by :func:`are_alike`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if (access := generator_access(value)) is not None:
        return repr(access[0]())
    if depth and isinstance(value, dict):
        return {key: values_of(each, depth=depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple | deque):
        return [values_of(each, depth=depth - 1) for each in value]
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    is_users = not isinstance(value, (*PLAIN, type, nn.Module)) and not is_of_a_library(type(value))
    if depth and is_users and isinstance(held := getattr(value, "__dict__", None), dict):
        return [type(value), values_of(held, depth=depth - 1)]
    return value


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two results of :func:`values_of` hold the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensor(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if isinstance(one, set | bytearray):
        return type(one) is type(other) and bool(one == other)
    return _is_same(one, other)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function's code, and in the functions in it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names_in(one)


def _called(owner: type, first: Collection[str] = ("forward", "__call__")) -> dict[str, types.FunctionType]:
    """Return the methods that the ``first`` of a class may call by their names, and these, by name."""
    own = (vars(each).items() for each in reversed(owner.__mro__) if not is_of_a_library(each))
    methods = {key: getattr(value, "__func__", value) for items in own for key, value in items}
    called, following = dict[str, types.FunctionType](), [*first]
    while following:
        key = following.pop()
        if key not in called and isinstance(method := methods.get(key), types.FunctionType):
            called[key] = method
            following += _names_in(method.__code__)
    return called


def names_used_by(owner: type, first: Collection[str] = ("forward", "__call__")) -> set[str]:
    """Return the names, of attributes and all else, in the code of the ``first`` methods and of those called."""
    return {name for method in _called(owner, first).values() for name in _names_in(method.__code__)}


def generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return how the state of a random generator is read and set; None: ``value`` is none."""
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().tolist(), lambda state: _set_torch_state(value, state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _set_torch_state(generator: torch.Generator, state: list[int]) -> None:
    generator.set_state(torch.tensor(state, dtype=torch.uint8))


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (isinstance(before, PLAIN) and type(value) is type(before) and value == before)


def _same_tensor(tensor: Tensor, before: Tensor) -> bool:
    if tensor.shape != before.shape or tensor.dtype != before.dtype or tensor.layout != before.layout:
        return False
    if tensor.layout is not torch.strided:
        tensor, before = tensor.to_dense(), before.to_dense()
    if torch.equal(tensor, before):
        return True
    nans = before != before
    return bool(nans.any()) and bool(((tensor == before) | ((tensor != tensor) & nans)).all())


def is_of_a_library(kind_of: Any) -> bool:
    """Return whether a class or function is of one of ``LIBRARIES``, whose objects are not looked into."""
    return str(kind_of.__module__).partition(".")[0] in LIBRARIES
