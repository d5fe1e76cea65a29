"""Runs a forward on stand-ins, and refuses what torch.fx would get wrong without a word."""

import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.errors import PartitionError
from adl_dist.partition.forward_patches import CHECKPOINTS, Patches
from adl_dist.partition.module_state import ModuleState, Streams
from adl_dist.partition.nodes import asks_about_tensor, asks_for_shape, is_of_library, is_of_python
from adl_dist.partition.ran import (
    Pair,
    Ran,
    Samples,
    ValuesAskedForError,
    is_of_torch,
    is_same,
    run,
    same_values,
    shape_only,
)
from adl_dist.partition.stand_in import OF_SHAPES, SAME, Held, Known, is_instance, stand_in

_OTHER_DEVICE = {"cpu": torch.device("cuda", 0), "cuda": torch.device("cpu")}


class UntraceableError(PartitionError):
    """A line of the forward cannot be read.

    Attributes:
        where: the module in whose forward it lies; empty: the model's own.
    """

    def __init__(self, text: str, where: str = "") -> None:
        self.where = where
        super().__init__(text)


@dataclass(frozen=True)
class Reading:
    """A forward as it was read; all but the graph is empty without samples."""

    graph: fx.Graph
    known: dict[fx.Node, Known] = field(default_factory=dict)
    ran: dict[fx.Node, Ran] = field(default_factory=dict)  # what layers, and functions that were given modules, did
    written: set[fx.Node] = field(default_factory=set)  # whose tensors were written to after they were made
    drawing: set[fx.Node] = field(default_factory=set)
    repeatable: set[fx.Node] = field(default_factory=set)  # calls of modules that ask their input for its shape alone
    sizes: tuple[int, int] | None = None  # of the two batches


def symbolic(model: nn.Module, *, granularity: str, samples: Samples | None) -> Reading:
    """Return the operations of ``model`` in its present mode, with one placeholder; see :func:`trace.read`.

    Raises:
        PartitionError: it cannot be traced, or a cut model would do something else.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not positional or needed not in ([], [positional[0].name]):
        raise PartitionError(
            f"{type(model).__name__}.forward takes {', '.join(p.name for p in parameters) or 'nothing'}; expected one "
            "input, all else with defaults: wrap the model in a module whose forward takes one tensor"
        )
    _check_hooks(model, type(model).__name__)
    with _as_before(model):
        tracer = _Tracer(model, granularity, samples)
        # It may warn of what it does when it runs; that it will do once more, where it trains.
        with warnings.catch_warnings(action="ignore"), tracer.patches.applied():
            try:
                graph = tracer.trace(model)
            except Exception as error:  # the user's own forward, met by stand-ins, can raise anything
                raise _refused(model, tracer, tracer.refusal or error) from error
        if tracer.refusal is not None:  # the forward has caught it, and gone another way
            raise _refused(model, tracer, tracer.refusal) from tracer.refusal
    return tracer.reading(graph)


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after its forward or backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class _Tracer(fx.Tracer):
    """Reads one forward; ``known`` holds the values of its nodes for two batches, if there are samples."""

    def __init__(self, model: nn.Module, granularity: str, samples: Samples | None) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=CHECKPOINTS)
        self._granularity, self._samples = granularity, samples
        self._with_gradient, self._around = torch.is_grad_enabled(), _surroundings()
        self.where = ""  # the innermost module whose forward could not be read
        self.refusal: Exception | None = None  # the first, which the forward may catch
        self.has_failed: BaseException | None = None  # of the forward itself, when it ran on a sample
        self.known: dict[fx.Node, Known] = {}
        self._ran: dict[fx.Node, Ran] = {}
        self._versions: dict[fx.Node, list[tuple[Tensor, int]]] = {}
        self._drawing: set[fx.Node] = set()
        self._of_data: set[fx.Node] = set()  # what depends on more than shapes and buffers
        self._repeatable: set[fx.Node] = set()
        self._held: dict[str, Held] = {}
        self._copies: dict[str, tuple[Any, Any]] = {}
        self.is_paused = False  # while parts of the model run as they are, and nothing is read
        self.patches = Patches(self)
        self.names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}

    def reading(self, graph: fx.Graph) -> Reading:
        """Return what was found besides the ``graph``."""
        written = {node for node, before in self._versions.items() if any(t._version != v for t, v in before)}
        sizes = (len(self._samples[0]), len(self._samples[1])) if self._samples is not None else None
        return Reading(graph, self.known, self._ran, written, self._drawing, self._repeatable, sizes)

    def refuse(self, text: str) -> NoReturn:
        """Stop reading; what is refused is refused also if the forward catches the error."""
        raise self._noted(fx.proxy.TraceError(text))

    def _noted(self, error: Exception) -> Exception:
        self.refusal = self.refusal or error
        return error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what runs inside run as it is."""
        was, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was

    def proxy(self, node: fx.Node) -> Any:
        return stand_in(node, self, self.known.get(node))

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.refuse("a condition on it needs its value, which is not known while the forward is read")

    def iter(self, obj: Any) -> Iterator[Any]:
        return obj.elements()  # type: ignore[no-any-return]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # One placeholder, whatever else the forward could take: it is called as a stage will be.
        self._input = self.create_proxy("placeholder", "input", (), {})
        return (lambda root, x: root.forward(x)), [self.root, self._input]

    def input_device(self) -> Any:
        """Return the device of the model's input."""
        return self.create_proxy("call_function", getattr, (self._input, "device"), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._granularity == "block":
            return type(m) is not nn.Sequential
        # A module without children is one layer, whatever it does: it need not be traceable, keeps its switch
        # between training and evaluation, and could not be cut anyway. torch's own are known not to be read.
        of_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return of_torch or next(m.children(), None) is None

    def held(self, tensor: Tensor) -> Held:
        """Return the stand-in of a registered parameter or buffer."""
        name = self.names[id(tensor)]
        if name not in self._held:
            self._held[name] = Held(self.create_node("get_attr", name, (), {}), self, tensor)
        return self._held[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Buffers, too: what the forward computes from one would be computed now, once and for all.
        if not self.is_paused and id(attr_val) in self.names and isinstance(attr_val, Tensor):
            return self.held(attr_val)
        return attr_val

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        try:
            if isinstance(a, MethodType) and isinstance(a.__self__, nn.Module):
                return self.create_node("call_function", getattr, (self.create_arg(a.__self__), a.__name__), {})
            if isinstance(a, nn.Module) and a is self.root:
                raise TypeError("the model itself is called inside of its forward")
            if isinstance(a, FunctionType | partial):
                raise TypeError("a function is handed over that cannot be read; hand over the module itself")
            if isinstance(a, nn.Parameter) and id(a) not in self.names:
                raise TypeError("a parameter is used that is not registered with the model")
            return super().create_arg(a)
        except (TypeError, NotImplementedError, NameError, RuntimeError) as error:
            raise self._noted(error) from None

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._with_gradient and self.root.training:
            self.refuse(
                "torch.no_grad, or the forward of a torch.autograd.Function, would not be read: call .detach() on what "
                "is computed, or hide the function by torch.fx.wrap"
            )
        autocast, hooks = _surroundings()
        if autocast != self._around[0]:
            self.refuse("torch.autocast would not be read: hide the function that uses it by torch.fx.wrap")
        if hooks is not self._around[1]:
            self.refuse("what autograd.graph.saved_tensors_hooks do, as those of checkpointing, would not be read")
        node = super().create_node(kind, *args, **kwargs)
        sources = node.all_input_nodes
        of_shapes = bool(sources) and is_of_python(node) and all(source.meta.get(OF_SHAPES) for source in sources)
        node.meta[OF_SHAPES] = of_shapes or asks_for_shape(node)
        if self._samples is not None and kind != "output":
            try:
                self.known[node] = known = self._run(node)
                tensors = [leaf for leaf in tree_leaves(known.pair) if isinstance(leaf, Tensor)]
                self._versions[node] = [(t, t._version) for t in tensors if not t.is_inference()]
            except Exception as error:
                self.has_failed = error
                self.graph.erase_node(node)
                raise
        return node

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_paused:
            return forward(*args, **kwargs)
        if m not in (self.submodule_paths or {}):
            self.refuse(f"a {type(m).__name__} is called that is not registered: hold it in an nn.ModuleList, say")
        if not self.is_leaf_module(m, name := self.path_of_module(m)):
            _check_hooks(m, name)
        stack = self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.where, self.module_stack = self.where or name, stack
            raise

    def _run(self, node: fx.Node) -> Known:
        """Return the values of ``node``; what it moves of the model and of random streams is put back."""
        with self.paused():
            if node.op == "placeholder":
                assert self._samples is not None
                self._of_data.add(node)
                return Known((self._samples[0].clone(), self._samples[1].clone()))
            if node.op == "get_attr":
                value = self._copied(str(node.target))
                if not isinstance(value[0], Tensor) or value[0].requires_grad:
                    self._of_data.add(node)
                return Known(value)
            arguments = self._arguments(node, 0), self._arguments(node, 1)
            modules = self._modules(node, arguments[0])
            # torch's own layers and functions do not notice that a forward is read; the user's may.
            is_of_user = not (all(map(is_of_torch, modules)) and is_of_library(node))
            with self.patches.lifted(completely=is_of_user):
                ran = run(self._callable(node), arguments, modules=modules)
                is_candidate = node.op == "call_module" and is_same(ran, modules[0])
                asks_for_shapes = is_candidate and self._asks_for_shapes(node, ran)
            self._note(node, ran, modules, asks_for_shapes=asks_for_shapes)
            elsewhere = self._elsewhere(node) if node.meta[OF_SHAPES] else SAME
            return Known(ran.values, elsewhere, self._is_data(node, ran.values[0]))

    def _note(self, node: fx.Node, ran: Ran, modules: Sequence[nn.Module], *, asks_for_shapes: bool) -> None:
        if modules:
            self._ran[node] = ran
        if ran.draws:
            self._drawing.add(node)
        if asks_for_shapes:
            self._repeatable.add(node)
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
        except ValuesAskedForError:
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
            value: Any = self.root
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
            return self.root.get_submodule(str(node.target))
        if node.op == "call_method":
            return lambda value, *args, **kwargs: getattr(value, str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target

    def _modules(self, node: fx.Node, arguments: Any) -> list[nn.Module]:
        if node.op == "call_module":
            return [self.root.get_submodule(str(node.target))]
        given = (getattr(value, "__self__", value) for value in tree_leaves(arguments))
        return [value for value in given if isinstance(value, nn.Module)]

    def _elsewhere(self, node: fx.Node) -> Any:
        """Return the value of a shape on another kind of device; ``SAME``: no device is part of it."""
        (source, *_), of_device = node.all_input_nodes, {"device", "is_cuda", "is_cpu"}
        if asks_for_shape(node):
            device = getattr(self.known[source].pair[0], "device", None)
            other = _OTHER_DEVICE.get(getattr(device, "type", ""))
            if node.target is not getattr or node.args[1] not in of_device or other is None:
                return SAME
            return other if node.args[1] == "device" else f"is_{other.type}" == node.args[1]
        if all(self.known[n].elsewhere is SAME for n in node.all_input_nodes):
            return SAME

        def value(n: fx.Node) -> Any:
            known = self.known[n]
            return known.pair[0] if known.elsewhere is SAME else known.elsewhere

        args, kwargs = _mapped(node, value)
        return self._callable(node)(*args, **kwargs)


def _mapped(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    return fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Undo the side effects of the forward, and refuse those that a cut model would have to repeat each time."""
    streams, state = Streams(), ModuleState.of(model)
    holders = [(held, {**held}) for m in model.modules() for held in (m.__dict__, m._buffers)]
    constants: dict[str, Any] = {}
    try:
        yield
    finally:
        draws = streams.moved()
        streams.restore()
        for holder, before in holders:
            for key, value in [*holder.items()]:
                if key.startswith("_tensor_constant") and key not in before:
                    constants[key] = holder.pop(key)
                elif is_instance(value, fx.Proxy) and before.get(key) is None:
                    # What it leaves where nothing was is nothing that a later forward counts on.
                    holder.update({key: None}) if key in before else holder.pop(key)
        changed = [found.name for found in state.changes()]
        state.restore()
        model.__dict__.update(constants)  # the graph reads them
    if draws:
        raise PartitionError(
            f"{type(model).__name__}.forward draws random numbers that do not depend on its input, and tracing would "
            "draw them once and for all: hide the function that draws them from tracing by torch.fx.wrap"
        )
    if changed:
        raise PartitionError(
            f"{type(model).__name__}.forward changes {', '.join(changed)}, which a cut model would not: write to "
            "a buffer in place, or do it in a layer of its own, a module without children"
        )


def _surroundings() -> tuple[list[bool], Any]:
    """Return in which dtypes operations compute, and what is done with tensors that are kept for the backward."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return autocast, torch._C._autograd._top_saved_tensors_default_hooks(True)


def _check_hooks(module: nn.Module, name: str) -> None:
    if has_hooks(module):
        raise PartitionError(
            f"{name} has hooks, but is taken apart when the model is cut, so that they would never run: register them "
            "on its layers, or write what they do into its forward"
        )


def _refused(model: nn.Module, tracer: _Tracer, error: Exception) -> PartitionError:
    if isinstance(error, PartitionError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    library_files = (f"{torch.__path__[0]}/", f"{Path(__file__).parent}/", "<")
    ours = [frame for frame in frames if frame.line and not frame.filename.startswith(library_files)]
    line = f"{ours[-1].filename}:{ours[-1].lineno}: {ours[-1].line}" if ours else "its forward"
    line += f" ({tracer.where})" if tracer.where else ""
    why = shorten(str(error), 200, placeholder=" ...")
    if error is tracer.has_failed:
        why = f"{type(error).__name__}: {why}"
        return PartitionError(f"{type(model).__name__} fails on a batch of the data: {line}: {why}")
    return UntraceableError(
        f"{type(model).__name__} cannot be traced, so where it can be cut is not known: {line}: {why}", tracer.where
    )
