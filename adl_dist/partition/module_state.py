"""What a forward may move besides what it returns, as far as it can be seen from the module: found, told, put back.

A trial run must leave no marks, a traced forward must not hide any, and a checkpoint must hold what moves. What is
seen, and what is not: :mod:`adl_dist.partition.state_walk`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from adl_dist.partition.state_walk import TENSORS, Found, Key, Walk


@dataclass
class ModuleState:
    """A copy of all that can be seen from some modules, to be compared with and put back.

    Holds a copy of each tensor: as much memory as the modules.

    Attributes:
        found: all that is seen.
        tensors: (name, tensor) of all that can be seen from each of the modules, and then of the functions,
            and not from one before.
        copies: those of the tensors, by their ids.
    """

    found: list[Found] = field(default_factory=list)
    tensors: list[list[tuple[str, Tensor]]] = field(default_factory=list)
    copies: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *modules: nn.Module,
        only_registered: bool = False,
        alike: "ModuleState | None" = None,
        functions: Mapping[str, Any] = MappingProxyType({}),
        wanted: Callable[[Key], bool] = lambda key: True,
    ) -> "ModuleState":
        """Copy the present state of ``modules`` and of all modules in them, and of what ``functions`` reach, by name.

        ``only_registered``: only what is in their parameters and buffers, if they are known to move nothing else.
        ``alike``: another state of this moment, whose copies will do. ``wanted``: whether what has a key counts.
        """
        copies: dict[int, Tensor] = {} if alike is None else alike.copies
        walk, tensors = Walk(copies=copies, wanted=wanted), []
        for module in modules:
            before = len(walk.tensors)
            if only_registered:
                walk.take_registered([*module.named_modules()])
            else:
                walk.take_modules(module)
            tensors.append(walk.tensors[before:])
        for name, function in functions.items():
            before = len(walk.tensors)
            walk.take_function(name, function)
            tensors.append(walk.tensors[before:])
        return cls(walk.found, tensors, copies)

    def changes(self) -> list[Found]:
        """Return what is not as it was."""
        return [found for found in self.found if found.has_changed()]

    def changed_names(self) -> list[str]:
        """Return the names of :meth:`changes`, as the user would write them."""
        return [name for found in self.changes() for name in found.names]

    def restore(self, *, tensors: bool = True) -> None:
        """Put everything, or all but the values of ``tensors``, back in place: the same objects hold what they had."""
        for found in self.found:  # holders come before what they hold
            if (tensors or found.kind not in TENSORS) and found.has_changed():
                found.restore()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leave each module of ``model`` in the mode in which it was found."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Leave all that can be seen from ``model`` as it was found."""
    state = ModuleState.of(model)
    try:
        yield
    finally:
        state.restore()


def tensors_reached(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all tensors that can be seen from ``module``, registered or not, each once."""
    walk = Walk(copies=None)
    walk.take_modules(module)
    yield from walk.tensors
