"""The calls of one stage in one forward, to be made again without the user's Python: for recomputation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.partition.containers import map_tensors, tensors_in


class _Number(int):
    """In the place of a tensor: that which the call, or the input, of this number has made."""


class Tape:
    """What a stage has computed. It holds no tensor but parameters and those that do not depend on the batch."""

    def __init__(self, acts: Tensors) -> None:
        """Begin with ``acts``, what the stage gets."""
        self._numbers: dict[int, _Number] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[_Number | None], bool]] = []
        self._inputs = [self._number(act) for act in acts]
        self._result: Any = None

    def _number(self, tensor: Tensor) -> _Number:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = _Number(len(self._numbers))
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is computed by the calls so far."""
        return id(tensor) in self._numbers

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """Note that ``tensor`` is ``other`` under another object."""
        self._numbers[id(tensor)] = self._number(other)
        self._alive.append(tensor)

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any, *, draws: bool = False) -> None:
        """Note one call, with its arguments and result."""
        args, kwargs = self._numbered((args, kwargs))
        self._steps.append((function, args, kwargs, [self._number(t) for t in tensors_in(out)], draws))

    def _numbered(self, value: Any) -> Any:
        return map_tensors(lambda t: self._numbers.get(id(t), t), value)

    def end(self, result: Any) -> None:
        """Note what the stage returns, and let go of all tensors."""
        self._result = self._numbered(result)
        self._numbers, self._alive = {}, []

    def play(self, acts: Tensors, own_stream: Callable[[], Any]) -> Any:
        """Make the calls again, for the same ``acts``, and return the result; what draws runs in ``own_stream()``."""
        made: dict[int, Tensor] = dict(zip(self._inputs, acts, strict=True))

        def filled(value: Any) -> Any:
            return _map_numbers(made, value)

        for function, args, kwargs, numbers, draws in self._steps:
            if draws:
                with own_stream():
                    out = function(*filled(args), **filled(kwargs))
            else:
                out = function(*filled(args), **filled(kwargs))
            made |= zip(numbers, tensors_in(out), strict=True)  # type: ignore[arg-type]
        return filled(self._result)


def _map_numbers(made: dict[int, Tensor], value: Any) -> Any:
    if type(value) is _Number:
        return made[value]
    if isinstance(value, list | tuple):
        parts = [_map_numbers(made, one) for one in value]
        return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if type(value) is slice:
        return slice(*(_map_numbers(made, one) for one in (value.start, value.stop, value.step)))
    if isinstance(value, dict) or hasattr(value, "__dataclass_fields__"):
        import copy

        filled = copy.copy(value)
        for key, one in value.items() if isinstance(value, dict) else vars(value).items():
            if isinstance(filled, dict):
                filled[key] = _map_numbers(made, one)
            else:
                object.__setattr__(filled, key, _map_numbers(made, one))
        return filled
    return value
