"""What is put in the place of Python's and torch's functions while a forward is read, so that nothing goes past it."""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace as symbolic_trace
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from adl_dist.partition.stand_in import ISINSTANCE, Range, StandIn, is_instance

# What makes a tensor from a shape has no tensor to ask: torch.zeros(x.shape[0], 3).
FACTORIES = (
    *("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint", "tensor"),
    *("tril_indices", "triu_indices"),
)
ABOUT_DTYPES = ("finfo", "iinfo", "promote_types", "can_cast")
CHECKPOINTS = (checkpointing.checkpoint, checkpointing.checkpoint_sequential)  # each call of one is kept as one
_MODULE = {"__call__": nn.Module.__call__, "__getattr__": nn.Module.__getattr__}
_ASKS = {"size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "stride", "is_contiguous"}

Place = tuple[Any, str, Any]  # an object, its attribute, and what is put there


class Patches:
    """All that is patched while one forward is read."""

    def __init__(self, tracer: Any, *, varies: bool) -> None:
        """``varies``: what sizes decide is noted."""
        self._mode = _RegisteredRead(tracer)
        self._patched: list[Place] = [
            # A stand-in must not claim a class of its own accord (``__class__``): torch would take it for a tensor, and
            # read memory that is none.
            (builtins, "isinstance", is_instance),
            *([(builtins, "range", Range)] if varies else []),
            *((torch, name, _reading(getattr(torch, name))) for name in FACTORIES),
            *((torch, name, _answering(getattr(torch, name))) for name in ABOUT_DTYPES),
            *((checkpointing, function.__name__, _reading(function)) for function in CHECKPOINTS),
        ]
        self._before = [(holder, name, getattr(holder, name)) for holder, name, _ in self._patched]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Read what runs inside."""
        _put(self._patched)
        try:
            with self._mode:
                yield
        finally:
            _put(self._before)

    @contextmanager
    def lifted(self, *, completely: bool) -> Iterator[None]:
        """Inside of :meth:`applied`, let what runs inside run as ever.

        ``completely``: it may be the user's, and notice any patch, as torch.compile does; else what costs time remains,
        and torch's own layers and functions do not mind.
        """
        stack = torch.overrides._get_current_function_mode_stack()
        is_top = bool(stack) and stack[-1] is self._mode
        of_modules = [(nn.Module, name, getattr(nn.Module, name)) for name in _MODULE] if completely else []
        was_tracing = _set_tracing(False)
        if is_top:
            torch.overrides._pop_mode()
        originals = [(nn.Module, name, method) for name, method in _MODULE.items()]
        _put([*self._before, *originals] if completely else self._before[:1])
        try:
            yield
        finally:
            _put([*self._patched, *of_modules] if completely else self._patched[:1])
            if is_top:
                torch.overrides._push_mode(self._mode)
            _set_tracing(was_tracing)


class _RegisteredRead(TorchFunctionMode):
    """Lets registered tensors be read that are reached by another way than their attribute, like parameters()."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[StandIn] = []

        def held(value: Any) -> Any:
            if type(value) not in (int, float, bool, str) and id(value) in self._tracer.names:
                found.append(self._tracer.held(value))
                return found[-1]
            return value

        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._tracer.is_paused or name in _ASKS:
            return func(*args, **kwargs)
        read_args, read_kwargs = fx.node.map_aggregate((args, kwargs), held)
        if not found:
            return func(*args, **kwargs)
        if name == "__set__":
            self._tracer.refuse("an attribute of a parameter or a buffer is set, which is not read")
        if name == "__get__":
            return getattr(found[0], func.__self__.__name__)
        return StandIn.__torch_function__(func, types, tuple(read_args), dict(read_kwargs))


def _put(places: list[Place]) -> None:
    for holder, name, value in places:
        setattr(holder, name, value)


def _set_tracing(value: bool) -> bool:
    """Set torch.fx's note of whether it traces, and return what it was; each version of torch has its own place."""
    holder = getattr(symbolic_trace, "_is_fx_tracing_tls", symbolic_trace)
    name = "flag" if holder is not symbolic_trace else "_is_fx_tracing_flag"
    was = bool(getattr(holder, name, False))
    setattr(holder, name, value)
    return was


def _stand_ins(arguments: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(arguments, lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)
    return found


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        if not (found := _stand_ins((args, kwargs))):
            return function(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", function, args, kwargs)

    return read


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for the values of the arguments, which must be known."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        def value(argument: Any) -> Any:
            return argument.agreed("its dtype", lambda one: one) if ISINSTANCE(argument, StandIn) else argument

        args, kwargs = fx.node.map_aggregate((args, kwargs), value)
        return function(*args, **kwargs)

    return answer
