"""Runs a forward on stand-ins, and refuses what torch.fx would get wrong silently."""

import inspect
import math
import operator
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from adl_dist.batch import Several, call
from adl_dist.errors import PartitionError
from adl_dist.partition.forward_patches import CHECKPOINTS, Patches
from adl_dist.partition.known import Known
from adl_dist.partition.nodes import asks_for_shape, is_of_python, must_stay
from adl_dist.partition.ran import Samples, run
from adl_dist.partition.side_effects import as_before
from adl_dist.partition.stand_in import OF_SHAPES, Held, stand_in
from adl_dist.partition.values import Values


class UntraceableError(PartitionError):
    """A line of the forward cannot be read.

    Attributes:
        where: the module in whose forward it lies; empty: the model's own.
    """

    def __init__(self, text: str, where: str = "") -> None:
        self.where = where
        super().__init__(text)


class _FailedError(UntraceableError):
    """The forward fails on the values that it gets while it is read."""


_SIGNS: dict[Callable[..., Any], str] = {
    **{operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">="},
    **{operator.eq: "==", operator.ne: "!="},
}
_UNTRACEABLE = "{} cannot be traced, so where it can be cut is not known: "


def symbolic(
    model: nn.Module, *, granularity: str, samples: Samples | None, like: Values | None = None, varies: bool = False
) -> tuple[fx.Graph, Values | None]:
    """Return the operations of ``model`` in its present mode, and the values of its nodes.

    A placeholder stands for each tensor of its input.

    There are values only with ``samples``; see :func:`trace.read`. ``like``: those of the other mode.
    ``varies``: the graph checks what the forward decides by sizes.

    Raises:
        PartitionError: it cannot be traced, or a cut model would do something else.
    """
    check_signature(model, samples)
    if has_hooks(model):
        raise PartitionError(
            f"{type(model).__name__} has hooks, but is taken apart when it is cut, so that they would never run: "
            "register them on modules in it, or write what they do into its forward"
        )
    try:
        return _read(model, granularity, samples, like, varies=varies)
    except _FailedError as error:
        if samples is not None and _runs(model, samples):
            raise UntraceableError(
                f"{_UNTRACEABLE.format(type(model).__name__)}{error} (while it is read, not when it runs: what a layer "
                "or a hook leaves elsewhere than in what it returns cannot be read, nor a gradient asked for in it)",
                error.where,
            ) from error
        raise PartitionError(f"{type(model).__name__} fails on a batch of the data: {error}") from error


def check_signature(model: nn.Module, samples: Samples | None) -> None:
    """Raise a PartitionError unless the forward of ``model`` can be called with an input like those of ``samples``."""
    signature = inspect.signature(model.forward)
    args, kwargs = samples[0].arguments if samples is not None and isinstance(samples[0], Several) else ((None,), {})
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        given = f"{len(args)} by place" if args else f"{', '.join(kwargs)} by name"
        raise PartitionError(
            f"{type(model).__name__}.forward takes {takes}, but the input has {given} ({error}): let the dataset "
            "return as input one tensor, a tuple in the order of forward's arguments, or a dictionary by their names, "
            "or wrap the model in a module whose forward takes what there is"
        ) from None


def _read(
    model: nn.Module, granularity: str, samples: Samples | None, like: Values | None, *, varies: bool
) -> tuple[fx.Graph, Values | None]:
    with as_before(model, granularity):
        tracer = _Tracer(model, granularity, samples, like, varies=varies)
        # It may warn of what it does when it runs; that it will do once more, where it trains.
        with warnings.catch_warnings(action="ignore"), tracer.patches.applied():
            tracer.notes_decisions = varies
            try:
                graph = tracer.trace(model)
            except Exception as error:  # the user's own forward, met by stand-ins, can raise anything
                raise _refused(model, tracer, tracer.refusal or error) from error
            finally:
                tracer.notes_decisions = False  # numbers that the forward has kept outlive it
        if tracer.refusal is not None:  # the forward has caught it, and gone another way
            raise _refused(model, tracer, tracer.refusal) from tracer.refusal
    return graph, tracer.values


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after its forward or backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class _Tracer(fx.Tracer):
    """Reads one forward; ``known`` holds the values of its nodes for two batches, if there are samples."""

    def __init__(
        self, model: nn.Module, granularity: str, samples: Samples | None, like: Values | None, *, varies: bool
    ) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=CHECKPOINTS)
        self._granularity, self._samples = granularity, samples
        self._with_gradient, self._around = torch.is_grad_enabled(), _surroundings()
        self.where = ""  # the innermost module whose forward could not be read
        self.refusal: Exception | None = None  # the first, which the forward may catch
        self.failure: BaseException | None = None  # of the forward itself, when it ran on a sample
        self._held: dict[str, Held] = {}
        self.is_paused = False  # while parts of the model run as they are, and nothing is read
        self.notes_decisions = False  # whether what is asked about sizes is asked again whenever the graph runs
        self.patches = Patches(self, varies=varies)
        self.values = Values(model, samples, self.patches.lifted, like) if samples is not None else None
        self.known: dict[fx.Node, Known] = {} if self.values is None else self.values.known
        self.names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}

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
        # As many placeholders as the input has tensors, whatever else the forward could take: it is called as a stage
        # will be.
        whole = self._samples[0] if self._samples is not None else None
        if not isinstance(whole, Several):
            self._input = self.create_proxy("placeholder", "input", (), {})
            return (lambda root, x: root.forward(x)), [self.root, self._input]
        layout = whole.layout
        names = layout.names or [f"input_{place}" for place in range(layout.count)]
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in names]
        self._input = inputs[0]
        return (lambda root, *given: call(root.forward, layout.build(given))), [self.root, *inputs]

    def note_decision(self, ask: Callable[..., Any], number: Any, more: tuple[Any, ...], answer: Any) -> None:
        """Have the graph check that ``ask``, of a ``number`` made of sizes and of ``more``, gives this ``answer``."""
        if not self.notes_decisions or self.is_paused:
            return
        args = tuple(getattr(one, "node", one) for one in (number, *more))
        asked = self.create_node("call_function", ask, args, {})
        self.note_answer(asked, answer, f"{ask.__name__}(size)" if not more else f"size {_SIGNS[ask]} {more[0]}")

    def note_answer(self, asked: fx.Node, answer: Any, question: str) -> None:
        """Have the graph check that what ``asked`` makes of sizes is this ``answer`` to the ``question``."""
        if self.notes_decisions and not self.is_paused:
            self.create_node("call_function", must_stay, (asked, answer, question), {})

    def input_device(self) -> Any:
        """Return the device of the model's input."""
        return self.create_proxy("call_function", getattr, (self._input, "device"), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m._compiled_call_impl is not None:  # by its own compile()
            return True
        if self._granularity == "block":
            return type(m) is not nn.Sequential or has_hooks(m)
        # A module without children is one layer, whatever it does: it need not be traceable, keeps its switch
        # between training and evaluation, and could not be cut anyway. torch's own are known not to be read.
        # Nor can what torch.compile and TorchScript have made of a module; and hooks run where it is called.
        of_torch = m.__module__.startswith(("torch.nn", "torch._dynamo", "torch.jit"))
        is_one = (of_torch and not isinstance(m, nn.Sequential)) or has_hooks(m)
        return is_one or next(m.children(), None) is None

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
            if isinstance(a, dict) and is_dataclass(a):  # like transformers' ModelOutput; fx forgets its class
                return self.create_proxy("call_function", type(a), (), dict(a)).node
            return super().create_arg(a)
        except (TypeError, NotImplementedError, NameError, RuntimeError) as error:
            raise self._noted(error) from None

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._with_gradient and self.root.training:
            self.refuse(
                "torch.no_grad, or the forward of a torch.autograd.Function, would not be read: call .detach() on what "
                "is computed"
            )
        autocast, hooks = _surroundings()
        if autocast != self._around[0]:
            self.refuse("torch.autocast would not be read")
        if hooks is not self._around[1]:
            self.refuse("what autograd.graph.saved_tensors_hooks do, as those of checkpointing, would not be read")
        node = super().create_node(kind, *args, **kwargs)
        sources = node.all_input_nodes
        of_shapes = bool(sources) and is_of_python(node) and all(source.meta.get(OF_SHAPES) for source in sources)
        node.meta[OF_SHAPES] = of_shapes or asks_for_shape(node)
        if self.values is not None and kind != "output":
            try:
                with self.paused():
                    self.values.compute(node)
            except Exception as error:
                self.failure = error
                self.graph.erase_node(node)
                raise
        return node

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_paused:
            return forward(*args, **kwargs)
        if m not in (self.submodule_paths or {}):
            self.refuse(f"a {type(m).__name__} is called that is not registered: hold it in an nn.ModuleList, say")
        name, stack = self.path_of_module(m), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.where, self.module_stack = self.where or name, stack
            raise


def _surroundings() -> tuple[list[bool], Any]:
    """Return in which dtypes operations compute, and what is done with tensors that are kept for the backward."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return autocast, torch._C._autograd._top_saved_tensors_default_hooks(True)


def _runs(model: nn.Module, samples: Samples) -> bool:
    """Return whether the model itself runs on the ``samples``; what it moves is put back."""
    try:
        arguments: Any = ((samples[0].clone(),), {}), ((samples[1].clone(),), {})
        run(partial(call, model), arguments, modules=[model])
    except Exception:
        return False
    return True


def _refused(model: nn.Module, tracer: _Tracer, error: Exception) -> PartitionError:
    if isinstance(error, PartitionError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.line and not _is_of_library(frame.filename)]
    line = f"{ours[-1].filename}:{ours[-1].lineno}: {ours[-1].line}" if ours else "its forward"
    line += f" ({tracer.where})" if tracer.where else ""
    # Python's own words where it wants a whole number, as range() does.
    text = str(error).replace("'StandIn' object", "a value that is not the same for every batch")
    why = shorten(text, 200, placeholder=" ...")
    if error is tracer.failure:
        return _FailedError(f"{line}: {type(error).__name__}: {why}", tracer.where)
    return UntraceableError(f"{_UNTRACEABLE.format(type(model).__name__)}{line}: {why}", tracer.where)


def _is_of_library(filename: str) -> bool:
    is_of_python = filename.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in filename
    return is_of_python or filename.startswith((f"{torch.__path__[0]}/", f"{Path(__file__).parent}/", "<"))
