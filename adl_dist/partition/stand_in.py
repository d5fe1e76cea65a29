"""Stand-ins for the values of a forward while it is read.

With samples each knows its value for two batches of different sizes, and what a number would be elsewhere (known.py).
It then answers for itself what is the same everywhere, as the value would: its type, its size, a comparison of sizes.
What differs, like the number of samples, and what depends on the values of tensors, like a sum, cannot decide a branch:
it is refused.
"""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from adl_dist.partition.known import UNKNOWN, Known, is_same_value, scenario
from adl_dist.partition.nodes import IN_PLACE

OF_SHAPES = "of_shapes"  # in a node's ``meta``: whether it computes numbers from nothing but the shapes of tensors
_RANGE = range
ISINSTANCE = isinstance  # Python's own, which is replaced by :func:`is_instance` while a forward is read
_ANY_TENSOR = torch.empty(0)
_OWN = {"tracer", "node", "root", "attr", "_node", "_found", "_tensor"}  # attributes of stand-ins
_OF_TENSOR = {*("shape", "ndim", "dtype", "requires_grad", "size", "dim", "numel", "nelement")}
_CONTAINERS = (tuple, list, dict)
_HASHED = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size, str, int, float)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")


def stand_in(node: fx.Node, tracer: Any, known: Known | None) -> Any:
    """Return what the forward gets for ``node``: the value itself, if that is the same for any batch and no number."""
    if known is None:
        return StandIn(node, tracer)
    value = known.pair[0]
    if all(one is None for one in known.all):
        return None
    if known.is_data or not all(type(one) is type(value) for one in known.all):
        return StandIn(node, tracer)
    if type(value) in (bool, str, int, float) and all(one == value for one in known.all):
        if type(value) is bool and node.meta[OF_SHAPES]:
            tracer.note_answer(node, value, "a question about a shape or a dtype")
        return _KNOWN_NUMBERS[type(value)](value, node, tracer) if type(value) in _KNOWN_NUMBERS else value
    return StandIn(node, tracer)


class StandIn(fx.Proxy):
    """A value of the forward. What Python spells += works in place, as it does on tensors; torch.fx's own would not."""

    tracer: Any

    def is_a(self, kind: Any) -> bool:
        """Return whether its value is an instance of ``kind``; without samples, whatever is no shape is a tensor."""
        known = self.tracer.known.get(self.node)
        if known is not None:
            return ISINSTANCE(known.pair[0], kind)
        return not self.node.meta.get(OF_SHAPES) and ISINSTANCE(_ANY_TENSOR, kind)

    def __getattr__(self, name: str) -> Any:
        known = self.tracer.known.get(self.node)
        if known is None:
            return Attribute(self, name, None)
        if self.is_a(dict) and name in _OF_DICT:
            return partial(_OF_DICT[name], self)
        with self.tracer.paused():
            found = getattr(known.pair[0], name)  # an AttributeError, if it has none
        if isinstance(found, Tensor) or (callable(found) and not isinstance(found, nn.Module)):
            return Attribute(self, name, found)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value
        else:
            self.tracer.refuse(f"sets the attribute '{name}' of a value, which is not read")

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})

    def __bool__(self) -> bool:
        known = self.tracer.known.get(self.node)
        if known is None:
            return bool(super().__bool__())
        if isinstance(known.pair[0], Tensor):
            self.tracer.refuse("a condition on the values of a tensor would be decided once and for all")
        return bool(self.agreed("a condition on it", bool, of_structure=isinstance(known.pair[0], _CONTAINERS)))

    def __int__(self) -> int:
        return int(self.agreed("int() of it", int))

    def __float__(self) -> float:
        return float(self.agreed("float() of it", float))

    def __len__(self) -> int:
        return int(self.agreed("len() of it", len, of_structure=True))

    def __hash__(self) -> int:
        known = self.tracer.known.get(self.node)
        if known is None or not ISINSTANCE(known.pair[0], _HASHED):
            return object.__hash__(self)
        value, second = known.pair
        if known.elsewhere and all(is_same_value(one, value) for one in (second, *known.elsewhere[1:])):
            return object.__hash__(self)  # a device: a cache by it misses, and a table is found out by the check
        return hash(self.agreed("a look-up of it", lambda one: one))  # a table without it would go another way

    def __str__(self) -> str:
        known = self.tracer.known.get(self.node)
        shown = repr(self) if known is None or isinstance(known.pair[0], Tensor) else {str(one) for one in known.all}
        return shown if isinstance(shown, str) else shown.pop() if len(shown) == 1 else repr(self)

    def __contains__(self, item: Any) -> bool:
        known = self.tracer.known.get(self.node)
        if known is not None and isinstance(known.pair[0], dict):
            return bool(self.agreed("a question for a key", lambda value: item in value, of_structure=True))
        return any(element is item or element == item for element in self.elements())

    def elements(self) -> Iterator[Any]:
        """Return the elements of a container, or of a tensor's first dimension; the keys of a dictionary."""
        if self.is_a(dict):
            return iter(_keys(self))
        length = self.agreed("a walk through it", len, of_structure=True)
        return iter([self[place] for place in range(length)])  # type: ignore[index]

    def keys(self) -> Any:
        """Return the keys of a dictionary; of anything else, what it calls so."""
        return self.__getattr__("keys")()

    def agreed(self, question: str, ask: Callable[[Any], Any], *, of_structure: bool = False) -> Any:
        """Return the answer to ``ask`` if it is known and the same for any batch; refuse the ``question`` if not.

        ``of_structure``: it is about containers, which do not depend on what is in tensors.
        """
        known = self.tracer.known.get(self.node)
        if known is None:
            self.tracer.refuse(f"{question} needs its value, which is not known while the forward is read")
        if known.is_data and not of_structure:
            self.tracer.refuse(f"{question} depends on the values of tensors, and would be decided once and for all")
        with self.tracer.paused():
            answer, second = map(ask, known.pair)
            if second != answer:
                self._refuse_decision(question, f"is another for batches of other sizes ({answer} and {second})")
            for place, one in enumerate(known.elsewhere):
                if one is UNKNOWN:
                    self._refuse_decision(question, "may be another for batches of other sizes")
                if (found := ask(one)) != answer:
                    self._refuse_decision(question, f"is another {scenario(place)} ({answer} and {found})")
        if ask is len and ISINSTANCE(known.pair[0], Tensor):
            self.tracer.note_decision(int, self.size(0), (), answer)
        elif self.node.meta.get(OF_SHAPES) and ask in (bool, int, float, len):
            self.tracer.note_decision(ask, self, (), answer)
        elif self.node.meta.get(OF_SHAPES):  # the value itself is what is asked for
            self.tracer.note_answer(self.node, answer, question)
        return answer

    def _refuse_decision(self, question: str, why: str) -> None:
        self.tracer.refuse(f"{question} {why}, and would be decided once and for all")


def _keys(value: StandIn) -> list[Any]:
    return list(value.agreed("a walk through its keys", list, of_structure=True))


_OF_DICT: dict[str, Callable[..., Any]] = {
    "keys": _keys,
    "values": lambda value: [value[key] for key in _keys(value)],
    "items": lambda value: [(key, value[key]) for key in _keys(value)],
    "get": lambda value, key, default=None: value[key] if key in value else default,  # noqa: SIM401
}


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[StandIn, Any], Any]:
    return lambda value, other: value.tracer.create_proxy("call_function", operation, (value, other), {})


for _operation in IN_PLACE:
    setattr(StandIn, f"__{_operation}__", _in_place(getattr(operator, _operation)))


class Held(StandIn):
    """A parameter or a buffer: its shape and dtype are known, so that the forward may branch on them."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    def is_a(self, kind: Any) -> bool:
        """Return whether the tensor is an instance of ``kind``."""
        return ISINSTANCE(self._tensor, kind)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TENSOR:
            with self.tracer.paused():
                return getattr(self._tensor, name)
        if name == "device":  # that of the input: in training all is on one
            return self.tracer.input_device()
        return super().__getattr__(name)

    def __len__(self) -> int:
        with self.tracer.paused():
            return len(self._tensor)

    def __hash__(self) -> int:
        return object.__hash__(self)


class Attribute(StandIn):
    """An attribute, or a method that is about to be called: a node only if it is needed as one."""

    def __init__(self, root: StandIn, name: str, found: Any) -> None:
        self.tracer, self.root, self.attr, self._found = root.tracer, root, name, found
        self._node: fx.Node | None = None

    def is_a(self, kind: Any) -> bool:
        """Return whether the attribute is an instance of ``kind``."""
        return ISINSTANCE(self._found, kind) if self._found is not None else super().is_a(kind)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Return the node that reads the attribute."""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method: it is one node."""
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)

    def __hash__(self) -> int:
        return object.__hash__(self)


class _KnownNumber:
    """A number from shapes that is the same for every batch: to Python a number, to the graph a node."""

    node: fx.Node
    tracer: Any

    def __new__(cls, value: Any, node: fx.Node, tracer: Any) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.node, made.tracer = node, tracer
        return made


class KnownInt(_KnownNumber, int):
    """A whole number."""


class KnownFloat(_KnownNumber, float):
    """Any other."""


def _asked(ask: Callable[..., Any], of_number: Callable[..., Any]) -> Callable[..., Any]:
    def answer(number: Any, *more: Any) -> Any:
        found = of_number(number, *more)
        if found is not NotImplemented:
            number.tracer.note_decision(ask, number, more, found)
        return found

    return answer


_KNOWN_NUMBERS: dict[type, Any] = {int: KnownInt, float: KnownFloat}


def _arithmetic(operation: Callable[[Any, Any], Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(number: Any, other: Any) -> Any:
        if not isinstance(other, int | float | Tensor | StandIn) or isinstance(other, bool):
            return NotImplemented
        args = (other, number) if reflected else (number, other)
        return number.tracer.create_proxy("call_function", operation, args, {})

    return compute


def _divided(number: Any, other: Any) -> Any:
    return number // other, number % other


for _kind in (KnownInt, KnownFloat):
    for _name in (*_BINARY, *(_BITWISE if _kind is KnownInt else ())):
        for _prefix in ("", "r"):
            made = _arithmetic(getattr(operator, f"__{_name}__"), reflected=bool(_prefix))
            setattr(_kind, f"__{_prefix}{_name}__", made)
    _kind.__divmod__ = _divided  # type: ignore[method-assign]
    _kind.__rdivmod__ = lambda number, other: _divided(other, number)  # type: ignore
    # What Python asks such a number for, to use a plain one from there.
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _asked(getattr(operator, _name), getattr(_kind, f"__{_name}__")))
    for _name, _ask in (("bool", bool), ("int", int), ("float", float), ("round", round), ("hash", hash)):
        setattr(_kind, f"__{_name}__", _asked(_ask, getattr(_kind, f"__{_name}__")))
    _kind.__abs__ = lambda number: number.tracer.create_proxy("call_function", operator.abs, (number,), {})  # type: ignore
    _kind.__neg__ = lambda number: number.tracer.create_proxy("call_function", operator.neg, (number,), {})  # type: ignore

KnownInt.__invert__ = lambda number: number.tracer.create_proxy("call_function", operator.invert, (number,), {})  # type: ignore


class _OfRanges(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return ISINSTANCE(value, _RANGE)


class Range(metaclass=_OfRanges):
    """In the place of Python's ``range`` while a forward is read, for that asks a number for nothing."""

    def __new__(cls, *args: Any) -> Any:
        """Return a range of plain numbers, of which is noted that they decide something."""
        return _RANGE(*(int(number) if ISINSTANCE(number, KnownInt) else number for number in args))


def is_instance(value: Any, kind: Any) -> bool:
    """Return what ``isinstance`` returns for what a stand-in stands for. torch.fx may ask what it is itself."""
    if ISINSTANCE(value, StandIn):
        asks_fx = kind is fx.Proxy or (ISINSTANCE(kind, type) and issubclass(kind, StandIn))
        return asks_fx or value.is_a(kind)
    return ISINSTANCE(value, kind) or (kind is fx.Proxy and ISINSTANCE(value, KnownInt | KnownFloat))
