"""The values of a graph's nodes for two batches of different sizes, computed while a forward is read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.batch import tensors_of
from adl_dist.partition.known import (
    ALL_UNKNOWN,
    OF_SHAPE,
    PROBE_SIZES,
    Known,
    is_same_value,
    number_elsewhere,
    shape_elsewhere,
    tensor_elsewhere,
)
from adl_dist.partition.nodes import asks_about_tensor, asks_for_shape, function_name, is_of_library, is_of_python
from adl_dist.partition.ran import (
    Pair,
    Ran,
    Samples,
    is_of_torch,
    is_plain_of_torch,
    is_same,
    run,
    same_values,
    shape_only,
)
from adl_dist.partition.stand_in import OF_SHAPES

_OTHER_DEVICE = {"cpu": torch.device("cuda", 0), "cuda": torch.device("cpu")}


class Values:
    """What is found out about each node by running it.

    Attributes:
        known: the values.
        ran: what layers, and functions that were given modules, did.
        drawing: nodes that draw random numbers.
        repeatable: calls of modules that ask what depends on the input for its shape alone, and return the same for
            every batch.
        sizes: of the two batches.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        lifted: Callable[..., AbstractContextManager[None]],
        like: "Values | None" = None,
    ) -> None:
        """``lifted(completely=...)``: a context in which the parts of ``model`` run as if no forward was read.

        ``like``: the values of its forward in training. In evaluation torch's own layers and functions return the same
        but for the numbers in tensors, which nothing may depend on; so they do not run once more, up to where another
        thing is called.
        """
        self._model, self._samples, self._lifted, self._like = model, samples, lifted, like
        self._twins = iter(like.known if like is not None else ())
        self.sizes = len(samples[0]), len(samples[1])
        self.known: dict[fx.Node, Known] = {}
        self.ran: dict[fx.Node, Ran] = {}
        self.drawing: set[fx.Node] = set()
        self.repeatable: set[fx.Node] = set()
        self._of_data: set[fx.Node] = set()  # what depends on more than shapes and buffers
        self._versions: dict[fx.Node, list[tuple[Tensor, int]]] = {}
        self._copies: dict[str, Pair] = {}

    def compute(self, node: fx.Node) -> None:
        """Run ``node``, whose arguments have run; what it moves of the model and of random streams is put back."""
        if self._like is not None:
            if self._take_over(node, next(self._twins, None), self._like):
                return
            self._run_all()
        self._run(node)

    def _take_over(self, node: fx.Node, twin: fx.Node | None, like: "Values") -> bool:
        """Take what is known of ``twin``, the same step in training; return False if it may be otherwise."""
        if twin is None or _described(node) != _described(twin):
            return False
        if node.op == "call_module":
            may = is_plain_of_torch(self._model.get_submodule(str(node.target)))
            if not may:
                return self._returns_alike(node, twin, like)
        else:  # whether a tensor has a gradient is an attribute that depends on the mode
            may = is_of_library(node) and twin not in like.ran and (node.target is not getattr or asks_for_shape(node))
        if may:
            self._borrow(node, twin, like)
        return may

    def _borrow(self, node: fx.Node, twin: fx.Node, like: "Values") -> None:
        self.known[node], self._versions[node] = like.known[twin], like._versions[twin]
        if twin in like.ran:
            self.ran[node] = like.ran[twin]
        pairs = ((self.drawing, like.drawing), (self.repeatable, like.repeatable), (self._of_data, like._of_data))
        for own, other in pairs:
            if twin in other:
                own.add(node)

    def _returns_alike(self, node: fx.Node, twin: fx.Node, like: "Values") -> bool:
        """Run a module of the user's on what there is in training; return whether it does nothing else there."""
        if twin in like.repeatable or any(source in like.repeatable for source in twin.all_input_nodes):
            return False
        arguments = tree_map(_copy, (self._arguments(node, 0), self._arguments(node, 1)))
        versions = [t._version for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        modules = self._modules(node, arguments[0])
        try:
            with self._lifted(completely=True):
                ran = run(self._callable(node), arguments, modules=modules)
        except Exception:  # with its own values it may not fail, or tell more
            return False
        before = like.ran[twin]
        is_alike = tree_map(_kind, ran.values) == tree_map(_kind, before.values)
        if not is_alike or [t._version for t in tree_leaves(arguments) if isinstance(t, Tensor)] != versions:
            return False
        self.known[node], self._versions[node] = like.known[twin], like._versions[twin]
        self._note(node, ran, modules, asks_for_shapes=False)
        return True

    def _run_all(self) -> None:
        """Run what was taken over until now."""
        self._like, nodes = None, [*self.known]
        self.known.clear()  # not a new one: the tracer has it, too
        self.ran, self._versions = {}, {}
        self.drawing, self.repeatable, self._of_data = set(), set(), set()
        for node in nodes:
            self._run(node)

    def _run(self, node: fx.Node) -> None:
        self.known[node] = known = self._value(node)
        tensors = [leaf for leaf in tree_leaves(known.pair) if isinstance(leaf, Tensor)]
        self._versions[node] = [(t, t._version) for t in tensors if not t.is_inference()]

    def forget(self) -> None:
        """Let go of all values: their graphs hold the weights, and Python's collector may not come for long."""
        self.known.clear()
        self.ran.clear()
        self._versions.clear()
        self._copies.clear()
        self._like, self._twins = None, iter(())

    def written(self) -> set[fx.Node]:
        """Return the nodes whose tensors were written to after they were made."""
        return {node for node, before in self._versions.items() if any(t._version != v for t, v in before)}

    def _value(self, node: fx.Node) -> Known:
        if node.op == "placeholder":
            self._of_data.add(node)
            place = sum(1 for known in self.known if known.op == "placeholder")
            first, second = (tensors_of(batch)[place].clone() for batch in self._samples)
            return Known((first, second))
        if node.op == "get_attr":
            value = self._copied(str(node.target))
            if not isinstance(value[0], Tensor) or value[0].requires_grad:
                self._of_data.add(node)
            return Known(value)
        arguments = self._arguments(node, 0), self._arguments(node, 1)
        modules = self._modules(node, arguments[0])
        # torch's own layers and functions do not notice that a forward is read; the user's may.
        is_of_user = not (all(map(is_of_torch, modules)) and is_of_library(node))
        with self._lifted(completely=is_of_user):
            ran = run(self._callable(node), arguments, modules=modules)
            is_candidate = node.op == "call_module" and is_same(ran, modules[0])
            asks_for_shapes = is_candidate and self._asks_for_shapes(node, ran)
            elsewhere = self._elsewhere(node, ran.values, may_ask=is_of_library(node) and not modules)
        self._note(node, ran, modules, asks_for_shapes=asks_for_shapes)
        return Known(ran.values, elsewhere, self._is_data(node, ran.values[0]))

    def _note(self, node: fx.Node, ran: Ran, modules: Sequence[nn.Module], *, asks_for_shapes: bool) -> None:
        if modules:
            self.ran[node] = ran
        if ran.draws:
            self.drawing.add(node)
        if asks_for_shapes:
            self.repeatable.add(node)
        elif not node.meta[OF_SHAPES] and not self._of_data.isdisjoint(node.all_input_nodes):
            self._of_data.add(node)

    def _arguments(self, node: fx.Node, batch: int) -> Pair:
        """Return args and kwargs of ``node`` for the first or the second batch."""
        return _mapped(node, lambda source: self.known[source].pair[batch])

    def _asks_for_shapes(self, node: fx.Node, ran: Ran) -> bool:
        """Return whether a module returns the same if it cannot see the values of what depends on the input."""

        def value(source: fx.Node) -> Any:
            first = self.known[source].pair[0]
            return tree_map(shape_only, first) if source in self._of_data else first

        args, kwargs = _mapped(node, value)
        try:
            again = self._callable(node)(*args, **kwargs)
        except Exception:  # ValuesAskedForError, or the module's own, if it catches that
            return False
        return same_values((again, ran.values[0]))

    def _is_data(self, node: fx.Node, value: Any) -> bool:
        """Return whether numbers in ``value`` may depend on what is in tensors."""
        if isinstance(value, Tensor) or asks_about_tensor(node):
            return False
        sources = [self.known[source] for source in node.all_input_nodes]
        if is_of_python(node) and not any(k.is_data or isinstance(k.pair[0], Tensor) for k in sources):
            return False
        return any(isinstance(leaf, bool | int | float | complex | str) for leaf in tree_leaves(value))

    def _copied(self, target: str) -> tuple[Any, Any]:
        if target not in self._copies:
            value: Any = self._model
            for part in target.split("."):
                value = getattr(value, part)
            if isinstance(value, Tensor):  # copies, for the forward may write to it
                copies = [value.detach().clone().requires_grad_(value.requires_grad) for _ in range(2)]
                self._copies[target] = (copies[0], copies[1])
            else:
                self._copies[target] = (value, value)
        return self._copies[target]

    def _callable(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_module":
            return self._model.get_submodule(str(node.target))
        if node.op == "call_method":
            return lambda value, *args, **kwargs: getattr(value, str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target

    def _modules(self, node: fx.Node, arguments: Any) -> list[nn.Module]:
        if node.op == "call_module":
            return [self._model.get_submodule(str(node.target))]
        given = (getattr(value, "__self__", value) for value in tree_leaves(arguments))
        return [value for value in given if isinstance(value, nn.Module)]

    def _elsewhere(self, node: fx.Node, pair: Pair, *, may_ask: bool) -> tuple[Any, ...]:
        """Return the value for batches of other sizes and on another kind of device, as :class:`Known` has it.

        ``may_ask``: it may be called again, on tensors without memory.
        """
        sources = [self.known[source] for source in node.all_input_nodes]
        value = Known(pair)
        if value.holds_tensors:
            call = self._callable(node) if may_ask else None
            return tensor_elsewhere(call, node, self.known.__getitem__, pair, self.sizes)
        if pair[0] is None:
            return ()
        tensors = [source for source in sources if source.holds_tensors]
        numbers_stay = not any(source.elsewhere for source in sources if not source.holds_tensors)
        if asks_about_tensor(node) and len(tensors) == 1 and isinstance(tensors[0].pair[0], Tensor) and numbers_stay:
            return self._answered(node, tensors[0], pair)
        if is_of_python(node) and not tensors and not numbers_stay:
            return number_elsewhere(self._callable(node), node, self.known.__getitem__, pair[0])
        is_same = is_same_value(*pair) and not any(source.elsewhere for source in sources)
        return () if is_same else ALL_UNKNOWN

    def _answered(self, node: fx.Node, tensor: Known, pair: Pair) -> tuple[Any, ...]:
        """Return what a tensor answers elsewhere, like :meth:`_elsewhere`."""
        first, second = tensor.pair
        name = str(node.args[1]) if node.target is getattr else function_name(node)
        other = _OTHER_DEVICE.get(first.device.type)
        if name in ("device", "is_cuda", "is_cpu") and other is not None:
            there = other if name == "device" else f"is_{other.type}" == name
            return (there, *[pair[0]] * len(PROBE_SIZES))
        if name not in OF_SHAPE:  # it may be about the shape all the same, like the number of bytes
            return () if is_same_value(*pair) else ALL_UNKNOWN
        if tensor.elsewhere:
            return ALL_UNKNOWN
        args, kwargs = self._arguments(node, 0)
        dims = [*args[1:], *kwargs.values()] if name == "size" else []
        return shape_elsewhere(name, dims, (first, second), self.sizes)


def _described(node: fx.Node) -> tuple[Any, ...]:
    """Return what a step of two graphs has in common; names are given in the order of the steps."""
    return node.name, node.op, node.target, repr(node.args), repr(node.kwargs)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Any) -> Any:
    """Return what may not be another: of a tensor shape and dtype, and anything else as it is."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _mapped(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    return fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
