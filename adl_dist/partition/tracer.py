"""Runs a forward on proxies, and refuses what torch.fx would get wrong without a word."""

import inspect
import math
import operator
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from adl_dist.errors import PartitionError

IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift"),
    "irshift",
)
FACTORIES = ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint")


def symbolic(model: nn.Module, *, granularity: str) -> fx.Graph:
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
    tracer = _Tracer(granularity)
    with _as_before(model), _factories_read():
        try:
            return tracer.trace(model)
        except PartitionError:
            raise
        except Exception as error:  # the user's own forward, met by proxies, can raise anything
            raise _refused(model, tracer.where, error) from error


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after its forward or backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class _Value(fx.Proxy):
    """A value of the forward. What Python spells += works in place, as it does on tensors; torch.fx's own would not."""


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[_Value, Any], Any]:
    return lambda value, other: value.tracer.create_proxy("call_function", operation, (value, other), {})


for _operation in IN_PLACE:
    setattr(_Value, f"__{_operation}__", _in_place(getattr(operator, _operation)))


class _Held(_Value):
    """A parameter or a buffer: its shape and dtype are known, so that the forward may branch on them."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor
        self.shape, self.ndim, self.dtype = tensor.shape, tensor.ndim, tensor.dtype
        self.size, self.dim, self.numel, self.nelement = tensor.size, tensor.dim, tensor.numel, tensor.nelement

    def __len__(self) -> int:
        return len(self._tensor)


class _Tracer(fx.Tracer):
    def __init__(self, granularity: str) -> None:
        super().__init__(autowrap_modules=(math,))
        self._granularity, self._with_gradient, self._autocast = granularity, torch.is_grad_enabled(), _autocast()
        self.where = ""  # the innermost module whose forward could not be read

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # One placeholder, whatever else the forward could take: it is called as a stage will be.
        return (lambda root, x: root.forward(x)), [self.root, self.create_proxy("placeholder", "input", (), {})]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._granularity == "block":
            return type(m) is not nn.Sequential
        # A module without children is one layer, whatever it does: it need not be traceable, keeps its switch
        # between training and evaluation, and could not be cut anyway. torch's own are known not to be read.
        of_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return of_torch or next(m.children(), None) is None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # Buffers, too: what the forward computes from one would be computed now, once and for all.
        if isinstance(attr_val, Tensor):
            for name, held in (*self.root.named_parameters(), *self.root.named_buffers()):
                if held is attr_val:
                    if name not in parameter_proxy_cache:
                        node = self.create_node("get_attr", name, (), {})
                        parameter_proxy_cache[name] = _Held(node, self, held)
                    return parameter_proxy_cache[name]
        return attr_val

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._with_gradient and self.root.training:
            raise RuntimeError(
                "torch.no_grad, or the forward of a torch.autograd.Function, would not be read: call .detach() on what "
                "is computed, or hide the function by torch.fx.wrap"
            )
        if _autocast() != self._autocast:
            raise RuntimeError("torch.autocast would not be read: hide the function that uses it by torch.fx.wrap")
        return super().create_node(kind, *args, **kwargs)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.is_leaf_module(m, name := self.path_of_module(m)):
            _check_hooks(m, name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.where = self.where or self.path_of_module(m)
            raise


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Undo the side effects of the forward, and refuse those that a cut model would have to repeat each time."""
    streams = _random_streams()
    holders = [(name, held, {**held}) for name, m in model.named_modules() for held in (m.__dict__, m._buffers)]
    assigned: list[str] = []
    tracing = object()  # stands for an attribute that was not there
    try:
        yield
    finally:
        draws = repr(_random_streams()) != repr(streams)
        torch.set_rng_state(torch.frombuffer(bytearray(streams[0]), dtype=torch.uint8))
        random.setstate(streams[1])
        np.random.set_state(streams[2])
        for name, holder, before in holders:
            assigned += [
                f"{name}.{key}".lstrip(".")
                for key in holder
                if not key.startswith("_tensor_constant") and holder[key] is not before.get(key, tracing)
                # What it leaves where nothing was is nothing that a later forward counts on.
                if not (isinstance(holder[key], fx.Proxy) and before.get(key) is None)
            ]
            for key in holder.keys() - before.keys():
                if not key.startswith("_tensor_constant"):  # those are read by the graph
                    del holder[key]
            holder.update(before)
    if draws:
        raise PartitionError(
            f"{type(model).__name__}.forward draws random numbers that do not depend on its input, and tracing would "
            "draw them once and for all: hide the function that draws them from tracing by torch.fx.wrap"
        )
    if assigned:
        raise PartitionError(
            f"{type(model).__name__}.forward assigns to {', '.join(assigned)}, which a cut model would not: write to "
            "a buffer in place, or do it in a layer of its own, a module without children"
        )


def _random_streams() -> tuple[bytes, Any, Any]:
    """Return the states of torch's, Python's and numpy's generators."""
    numpys: Any = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (numpys[0], numpys[1].tolist(), *numpys[2:])


def _autocast() -> list[bool]:
    return [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]


@contextmanager
def _factories_read() -> Iterator[None]:
    """Let what makes a tensor from a shape be read, too: torch.zeros(x.shape[0], 3) has no tensor to ask."""

    def reading(make: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            proxies: list[fx.Proxy] = []
            fx.node.map_aggregate((args, kwargs), lambda a: proxies.append(a) if isinstance(a, fx.Proxy) else None)
            if not proxies:
                return make(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", make, args, kwargs)

        return read

    made = {name: getattr(torch, name) for name in FACTORIES}
    for name, make in made.items():
        setattr(torch, name, reading(make))
    try:
        yield
    finally:
        for name, make in made.items():
            setattr(torch, name, make)


def _check_hooks(module: nn.Module, name: str) -> None:
    if has_hooks(module):
        raise PartitionError(
            f"{name} has hooks, but is taken apart when the model is cut, so that they would never run: register them "
            "on its layers, or write what they do into its forward"
        )


def _refused(model: nn.Module, where: str, error: Exception) -> PartitionError:
    frames = traceback.extract_tb(error.__traceback__)
    library_files = (f"{torch.__path__[0]}/", __file__, "<")
    ours = [frame for frame in frames if frame.line and not frame.filename.startswith(library_files)]
    line = f"{ours[-1].filename}:{ours[-1].lineno}: {ours[-1].line}" if ours else "its forward"
    line += f" ({where})" if where else ""
    return PartitionError(
        f"{type(model).__name__} cannot be traced, so where it can be cut is not known: {line}: "
        f"{' '.join(str(error).split())[:200]}; hide the function that holds this line from tracing by torch.fx.wrap, "
        "use partition.granularity=block if the line lies inside of a block, or hand over an nn.Sequential of units"
    )
