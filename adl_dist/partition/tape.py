"""The calls of one forward on one stage, repeated without user code."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.partition.containers import map_leaves, map_tensors, tensors_in


class _Number(int):
    """The number of an input or a result, in the place of its tensor."""


class Tape:
    """The calls of one stage in one forward.

    The only tensors it holds are parameters and those that do not depend on the batch.
    """

    def __init__(self, acts: Tensors) -> None:
        """Start a tape for the incoming activations ``acts``."""
        self._numbers: dict[int, _Number] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[_Number], Any, bool]] = []
        self._inputs = [self._number(act) for act in acts]
        self._buffers: dict[_Number, Tensor | str] = {}
        self._result: Any = None

    def _number(self, tensor: Tensor) -> _Number:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = _Number(len(self._numbers))
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is an input, buffer or result on the tape."""
        return id(tensor) in self._numbers

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """Note that ``tensor`` is the same as the object ``other``."""
        self._numbers[id(tensor)] = self._number(other)
        self._alive.append(tensor)

    def buffer(self, tensor: Tensor, kept: Tensor | str) -> None:
        """Note a changing buffer; ``kept`` is a copy, or its name in the stage."""
        self._buffers[self._number(tensor)] = kept

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any, *, draws: Any = None) -> None:
        """Note one call with its arguments and result.

        If the call draws, ``draws`` is True for the stage's own streams, or the state of the common ones.
        """
        args, kwargs = self._numbered((args, kwargs))
        numbers = [self._number(t) for t in tensors_in(out)]
        self._steps.append((function, args, kwargs, numbers, draws, torch.is_grad_enabled()))

    def _numbered(self, value: Any) -> Any:
        return map_tensors(lambda t: self._numbers.get(id(t), t), value)

    def end(self, result: Any) -> None:
        """Note the stage's result and release all tensors."""
        self._result = self._numbered(result)
        self._numbers, self._alive = {}, []

    def play(self, acts: Tensors, stream: Callable[[Any], Any], buffer: Callable[[str], Tensor]) -> Any:
        """Repeat the calls and return the result.

        Args:
            acts: Those of the forward.
            stream: Returns a context for a call that draws random numbers, from the noted state of the streams.
            buffer: Returns a buffer of the stage, as the forward met it.
        """
        made: dict[int, Tensor] = dict(zip(self._inputs, acts, strict=True))
        for number, kept in self._buffers.items():
            made[number] = buffer(kept) if isinstance(kept, str) else kept.clone()

        def filled(value: Any) -> Any:
            return map_leaves(lambda leaf: made[leaf] if type(leaf) is _Number else leaf, value, copies=True)

        for function, args, kwargs, numbers, draws, with_graph in self._steps:
            with stream(draws) if draws else nullcontext(), torch.set_grad_enabled(with_graph):
                out = function(*filled(args), **filled(kwargs))
            made |= zip(numbers, tensors_in(out), strict=True)
        return filled(self._result)
