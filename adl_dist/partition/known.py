"""What is known of a value of the forward: for two real batches, and in scenarios that are computed, not run.

A forward is read on two batches, of 2 and of 4 samples. A number that it makes of the number of samples may be the same
for both, and another one for the micro-batches of the run: ``max(B, 5)``, ``B % 8 == 0``. Such numbers are therefore
computed for many other sizes, the *probe sizes*, as well as for another kind of device, and only what is the same in
all these scenarios counts as known. The shape of a tensor is taken to be linear in the number of samples; an operation
of torch's is asked whether that is true, on tensors without memory.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from adl_dist.partition.state_walk import CAN_CROSS

# Dense, for tables and remainders; then powers and their neighbours, a prime, and a number with many divisors.
PROBE_SIZES = (
    *range(1, 131),
    *(144, 160, 192, 200, 255, 256, 257, 384, 500, 511, 512, 513, 1000, 1023, 1024, 1025),
    *(2048, 4096, 5040, 10006, 10007, 65536, 1_153_152_000),
)
SCENARIOS = (None, *PROBE_SIZES)  # the first is another kind of device
CHECKED_SIZES = 22, 10006  # at which operations are asked; even ones, for models that halve the batch
OF_SHAPE = {"shape", "size", "ndim", "dim", "ndimension", "numel", "nelement"}
_NOWHERE = torch.device("meta")  # where tensors have no memory
_PLAIN = (*CAN_CROSS, torch.layout, torch.memory_format)
_COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}


class _Unknown:
    """In the place of a value that cannot be told; whatever is computed from it fails, and so is unknown, too."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("it is unknown")

    def __bool__(self) -> bool:
        raise TypeError("it is unknown")

    __hash__ = object.__hash__


UNKNOWN = _Unknown()
ALL_UNKNOWN = (UNKNOWN,) * len(SCENARIOS)


@dataclass(frozen=True)
class Known:
    """What is known of a node.

    Attributes:
        pair: its value for each batch.
        elsewhere: its value in each of the ``SCENARIOS``; empty: the first of the pair in all of them or, of a tensor
            or a container of tensors, the same structure, with shapes that are linear in the number of samples.
        is_data: whether it is no tensor, and yet depends on what is in tensors.
    """

    pair: tuple[Any, Any]
    elsewhere: tuple[Any, ...] = ()
    is_data: bool = False

    @property
    def all(self) -> tuple[Any, ...]:
        """Every value that it may have."""
        return (*self.pair, *self.elsewhere)

    @cached_property
    def holds_tensors(self) -> bool:
        """Return whether it is a tensor, or a container of some."""
        first = self.pair[0]
        return isinstance(first, Tensor) or any(isinstance(leaf, Tensor) for leaf in tree_leaves(first))


def scenario(place: int) -> str:
    """Return the words for a scenario, by its place."""
    return f"for batches of {SCENARIOS[place]}" if place else "on another device"


def shape_elsewhere(name: str, dims: Sequence[Any], pair: tuple[Any, Any], sizes: tuple[int, int]) -> tuple[Any, ...]:
    """Return the answers of a tensor, with these values for batches of ``sizes``, about its shape.

    ``name`` is the attribute or method, ``dims`` what ``size`` is asked for, if anything.
    """
    shapes = _shapes(tuple(pair[0].shape), tuple(pair[1].shape), sizes)
    if not shapes or name in ("ndim", "dim", "ndimension"):
        return ()
    if name in ("numel", "nelement"):
        return _shared([_attempted(prod, shape) for shape in shapes], pair[0].numel())
    if name == "size" and dims:
        return _shared([shape[dims[0]] for shape in shapes], pair[0].shape[dims[0]])
    return shapes


def number_elsewhere(
    call: Callable[..., Any], node: fx.Node, known: Callable[[fx.Node], Known], value: Any
) -> tuple[Any, ...]:
    """Return in all scenarios the result of ``call``, that of a ``node`` which computes with numbers.

    ``value`` is its result for the first batch.
    """
    sources = [known(source) for source in node.all_input_nodes]
    if not any(source.elsewhere for source in sources):
        return ()
    if not all(_is_plain(source.pair[0]) for source in sources):
        return ALL_UNKNOWN

    def column(argument: Any) -> Iterable[Any]:
        if isinstance(argument, fx.Node):
            source = known(argument)
            return source.elsewhere or repeat(source.pair[0])
        nodes: list[fx.Node] = []
        if isinstance(argument, tuple | list | dict | slice):
            fx.node.map_arg(argument, nodes.append)
        if not nodes:
            return repeat(argument)
        rows = zip(range(len(SCENARIOS)), *map(column, nodes), strict=False)
        values = (dict(zip(nodes, row, strict=True)) for _, *row in rows)
        return [fx.node.map_arg(argument, row.__getitem__) for row in values]

    split, names = len(node.args), [*node.kwargs]
    rows = zip(range(len(SCENARIOS)), *map(column, (*node.args, *node.kwargs.values())), strict=False)
    if names:
        found = [_attempted(call, *row[:split], **dict(zip(names, row[split:], strict=True))) for _, *row in rows]
    else:
        found = [_attempted(call, *row) for _, *row in rows]
    shared = _shared(found, value)
    return ALL_UNKNOWN if not shared and _lies_between(node, known) else shared


def tensor_elsewhere(
    call: Callable[..., Any] | None,
    node: fx.Node,
    known: Callable[[fx.Node], Known],
    pair: tuple[Any, Any],
    sizes: tuple[int, int],
) -> tuple[Any, ...]:
    """Return nothing if the structure of ``pair`` stays, and its shapes are linear in the number of samples.

    As far as can be told: without ``call``, what a layer or a function of the user's returns is taken to be so, if what
    it gets is.
    """
    sources = [known(source) for source in node.all_input_nodes]
    first, second = tree_flatten(pair[0]), tree_flatten(pair[1])
    if first[1] != second[1] or any(source.holds_tensors and source.elsewhere for source in sources):
        return ALL_UNKNOWN
    is_certain = all(_is_linear(source, sizes) for source in sources)
    if call is None:
        return () if is_certain else ALL_UNKNOWN
    makes = {} if any(source.holds_tensors for source in sources) else {"device": _NOWHERE}  # a tensor of numbers
    with torch.no_grad():
        for size in CHECKED_SIZES:
            try:
                args, kwargs = _without_memory((node.args, node.kwargs), known, size, sizes)
                leaves, tree = tree_flatten(call(*args, **{**kwargs, **makes}))
            except NotImplementedError:  # its shape depends on what is in tensors, or is not known to torch
                return ALL_UNKNOWN
            except Exception:  # not for so many samples
                continue
            is_certain = True
            found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
            both = zip(first[0], second[0], strict=True)
            if tree != first[1] or found != [_shape(a, b, size, sizes) for a, b in both]:
                return ALL_UNKNOWN
    return () if is_certain else ALL_UNKNOWN


def _without_memory(given: Any, known: Callable[[fx.Node], Known], size: int, sizes: tuple[int, int]) -> Any:
    """Return arguments of a node as they would be for ``size`` samples, with tensors that hold nothing."""

    def empty(first: Any, second: Any) -> Any:
        shape = _shape(first, second, size, sizes)
        return plain(first) if shape is None else torch.empty(shape, dtype=first.dtype, device=_NOWHERE)

    def plain(found: Any) -> Any:
        if not _is_plain(found):
            raise TypeError(f"of type {type(found).__name__}")
        return found

    def value(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            source = known(argument)
            if source.holds_tensors:
                return tree_map(empty, *source.pair)
            argument = plain(source.elsewhere[SCENARIOS.index(size)] if source.elsewhere else source.pair[0])
        is_device = isinstance(argument, torch.device) or (
            isinstance(argument, str) and argument[:4] in ("cpu", "cuda")
        )
        return _NOWHERE if is_device else argument

    return fx.node.map_aggregate(given, value)


def _shape(first: Any, second: Any, size: int, sizes: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape for ``size`` samples of a tensor with these values for batches of ``sizes``, or None."""
    if not isinstance(first, Tensor):
        return None
    shapes = _shapes(tuple(first.shape), tuple(second.shape), sizes)
    return tuple(shapes[SCENARIOS.index(size)]) if shapes else tuple(first.shape)


@lru_cache(maxsize=1024)
def _shapes(first: tuple[int, ...], second: tuple[int, ...], sizes: tuple[int, int]) -> tuple[Any, ...]:
    """Return in all scenarios a shape that is so for batches of ``sizes``; empty: it is the same in all."""
    if first == second:
        return ()
    if len(first) != len(second):
        return ALL_UNKNOWN
    columns = [_linear(a, b, sizes) for a, b in zip(first, second, strict=True)]
    return tuple(row if any(one is UNKNOWN for one in row) else torch.Size(row) for row in zip(*columns, strict=True))


def _linear(first: int, second: int, sizes: tuple[int, int]) -> list[Any]:
    step, per = second - first, sizes[1] - sizes[0]
    found: list[Any] = [first]
    for size in PROBE_SIZES:
        more, rest = divmod(step * (size - sizes[0]), per)
        found.append(UNKNOWN if rest or first + more < 0 else first + more)
    return found


def _is_linear(source: Known, sizes: tuple[int, int]) -> bool:
    """Return whether a number, or a shape, is linear in the number of samples; or a tensor's shape."""
    first, second = source.pair
    if not _shared(source.elsewhere[1:], first):
        return True
    if type(first) is int:
        return is_same_value(tuple(_linear(first, second, sizes)), source.elsewhere)
    return type(first) is float or (
        isinstance(first, torch.Size) and is_same_value(_shapes(tuple(first), tuple(second), sizes), source.elsewhere)
    )


def _attempted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception:
        return UNKNOWN


def _shared(found: Sequence[Any], value: Any) -> tuple[Any, ...]:
    """Return what was ``found`` in all scenarios; nothing if it is ``value`` in all of them."""
    return () if all(type(one) is type(value) and is_same_value(one, value) for one in found) else tuple(found)


def _is_plain(value: Any) -> bool:
    """Return whether nothing but numbers, texts and the like are in it: a call may move a thing of the user's."""
    return all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value))


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values, which are no tensors, are known and equal."""
    try:
        return bool(one == other)
    except Exception:  # something in it is unknown
        return False


def _lies_between(node: fx.Node, known: Callable[[fx.Node], Known]) -> bool:
    """Return whether a number is compared with one between the probed ones: for a size between them it may be equal."""
    if node.target not in _COMPARISONS:
        return False
    sides = [known(side) if isinstance(side, fx.Node) else Known((side, side)) for side in node.args]
    varying = [side.elsewhere[1:] for side in sides if side.elsewhere]
    constant = [side.pair[0] for side in sides if not side.elsewhere]
    if len(varying) != 1 or len(constant) != 1:
        return False
    try:
        return bool(min(varying[0]) < constant[0] < max(varying[0]) and constant[0] not in varying[0])
    except Exception:  # a text, say, is never equal to a number
        return False
