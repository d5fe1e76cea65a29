"""What a forward may move besides what it returns, as far as it can be seen from the module: found, told, put back.

A trial run must leave no marks, a traced forward must not hide any, and a checkpoint must hold what moves. What is
seen, and what is not: :mod:`adl_dist.partition.state_walk`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adl_dist.partition.state_walk import TENSORS, Found, Key, Walk


@dataclass
class ModuleState:
    """A copy of all that can be seen from some modules, to be compared with and put back.

    Holds a copy of each tensor: as much memory as the modules.

    Attributes:
        found: all that is seen.
        tensors: (name, tensor) of all that can be seen from each of the modules, and from the function if there is one,
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
        wanted: Callable[[Key], bool] = lambda key: True,
        function: Any = None,
    ) -> "ModuleState":
        """Copy the present state of ``modules`` and of all modules in them.

        ``only_registered``: only what is in their parameters and buffers, if they are known to move nothing else.
        ``alike``: another state of this moment, whose copies will do. ``wanted``: whether what has a key counts.
        ``function``: called with what the modules return, like a loss; what it reaches counts, too.
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
        if function is not None:
            before = len(walk.tensors)
            walk.take("loss", function)
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


def tensors_reached(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all tensors that can be seen from ``module``, registered or not, each once."""
    walk = Walk(copies=None)
    walk.take_modules(module)
    yield from walk.tensors


class Streams:
    """The global random streams of this process: torch's on the CPU, Python's and numpy's legacy one, as they are."""

    def __init__(self) -> None:
        self._torchs, self._pythons = torch.get_rng_state(), random.getstate()
        self._numpys: Any = np.random.get_state(legacy=False)  # of whatever generator is set

    def moved(self) -> set[str]:
        """Return which of ``torch``, ``python`` and ``numpy`` have been drawn from, or seeded, since then."""
        now = Streams()
        pairs = {
            "torch": (now._torchs.numpy().tobytes(), self._torchs.numpy().tobytes()),
            "python": (now._pythons, self._pythons),
            "numpy": (_as_bytes(now._numpys), _as_bytes(self._numpys)),
        }
        return {name for name, (state, before) in pairs.items() if state != before}

    def restore(self) -> None:
        """Put all three back."""
        torch.set_rng_state(self._torchs)
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)


def _as_bytes(state: Any) -> Any:
    """Return the state of a numpy generator in a form that can be compared."""
    if isinstance(state, dict):
        return {key: _as_bytes(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
