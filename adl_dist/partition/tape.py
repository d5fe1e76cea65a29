"""The calls of one forward on one stage, repeated without user code."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.batch import Tensors, version_of
from adl_dist.errors import PartitionError
from adl_dist.partition.containers import map_leaves, map_tensors, tensors_in

Autocasts = tuple[tuple[str, torch.dtype | None], ...]  # by device; None: it is off


class _Number(int):
    """The number of an input or a result, in the place of its tensor."""


class Tape:
    """The calls of one stage in one forward.

    Besides parameters it holds only tensors that do not depend on the batch.
    """

    def __init__(self, acts: Tensors) -> None:
        """Start a tape for the incoming activations ``acts``."""
        self._numbers: dict[int, _Number] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one
        self._constants: list[tuple[Tensor, int]] = []  # with their versions
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[_Number], Any, bool, Autocasts]] = []
        self._autocasts = _autocasts()  # of the run, which a replay has, too
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
        """Note that ``tensor`` and ``other`` stand for the same value."""
        self._numbers[id(tensor)] = self._number(other)
        self._alive.append(tensor)

    def buffer(self, tensor: Tensor, kept: Tensor | str) -> None:
        """Note a changing buffer; ``kept`` is a copy, or its name in the stage."""
        self._buffers[self._number(tensor)] = kept

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any, *, draws: Any = None) -> None:
        """Note one call with its arguments and result.

        ``draws`` is True if the call draws from the stage's own streams, or the state of the common streams.

        Raises:
            PartitionError: If the call computes with a tensor whose computation is not on the tape.
        """
        self.end_call(function, self.begin_call(function, args, kwargs), out, draws=draws)

    def begin_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the noted arguments of a call that may change their containers."""
        if isinstance(module := getattr(function, "__self__", None), nn.Module):
            for part in module.modules():
                for key, held in vars(part).items():
                    if isinstance(held, Tensor) and self.knows(held):  # as a hook before the call has computed it
                        self.note(partial(_assign, part, key), (held,), {}, None)
        return self._numbered((args, kwargs))

    def end_call(self, function: Callable[..., Any], begun: Any, out: Any, *, draws: Any) -> None:
        """Note the result of a call, with its arguments of :meth:`begin_call`."""
        numbers = [self._number(t) for t in tensors_in(out)]
        autocasts = now if (now := _autocasts()) != self._autocasts else ()
        self._steps.append((function, *begun, numbers, draws, torch.is_grad_enabled(), autocasts))

    def _numbered(self, value: Any) -> Any:
        def number(tensor: Tensor) -> Any:
            found = self._numbers.get(id(tensor), tensor)
            if found is tensor and tensor.grad_fn is not None:
                raise PartitionError(
                    f"a {type(tensor).__name__}{[*tensor.shape]} comes from a computation that a replay of the forward "
                    "cannot repeat; use method.weights=stash, without recomputation"
                )
            if found is tensor:
                self._constants.append((tensor, version_of(tensor)))
            return found

        return map_tensors(number, value)

    def end(self, result: Any) -> None:
        """Note the stage's result and release all tensors.

        Raises:
            PartitionError: If the forward has written to a tensor that does not depend on the batch after its use.
        """
        self._result = self._numbered(result)
        for tensor, version in self._constants:
            if version_of(tensor) != version:
                raise PartitionError(
                    f"the forward writes to a tensor {[*tensor.shape]} after its use, so a replay would compute with "
                    "other elements; write to a copy, or use method.weights=stash, without recomputation"
                )
        self._numbers, self._alive, self._constants = {}, [], []

    def play(self, acts: Tensors, stream: Callable[[Any], Any], buffer: Callable[[str], Tensor]) -> Any:
        """Repeat the calls and return the result.

        Args:
            acts: The incoming activations of the forward.
            stream: Takes the ``draws`` of a call, and returns a context with the random streams for it.
            buffer: Takes a name, and returns this buffer of the stage as the forward met it.
        """
        made: dict[int, Tensor] = dict(zip(self._inputs, acts, strict=True))
        for number, kept in self._buffers.items():
            made[number] = buffer(kept) if isinstance(kept, str) else kept.clone()

        def filled(value: Any) -> Any:
            return map_leaves(lambda leaf: made[leaf] if type(leaf) is _Number else leaf, value, copies=True)

        for function, args, kwargs, numbers, draws, with_graph, autocasts in self._steps:
            with ExitStack() as around:
                if draws:
                    around.enter_context(stream(draws))
                for device, dtype in autocasts:
                    around.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
                around.enter_context(torch.set_grad_enabled(with_graph))
                out = function(*filled(args), **filled(kwargs))
            made |= zip(numbers, tensors_in(out), strict=True)
        return filled(self._result)


def _assign(module: nn.Module, key: str, tensor: Tensor) -> None:
    vars(module)[key] = tensor


def _autocasts() -> Autocasts:
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds)
