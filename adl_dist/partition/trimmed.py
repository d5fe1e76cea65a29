"""A stage of a model whose layers are in a list: the model itself, without what other stages hold.

Its forward runs as it is written, so masks, positions and rotary tables are made on each stage by the model's own
code. What is not on the stage is replaced: modules before the first layer return tensors that nothing computes with,
layers of other stages hand on what they get, the stage's first layer gets what has crossed the cut, and behind the
stage's last layer the forward is left by an exception.
"""

import copy
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from adl_dist.batch import Batch, Layout, Several, call, tensors_of
from adl_dist.errors import PartitionError, in_one_line
from adl_dist.partition.layered import HERE, Anatomy, Result, Shape
from adl_dist.partition.module_state import modes_kept, state_kept
from adl_dist.partition.nodes import ABOUT_TENSORS
from adl_dist.partition.piece import StageModule, shape_proxy, shape_token
from adl_dist.streams import streams_kept

_OWN = "of the stage"  # where it is kept: a name that no attribute of a user's module can have


class _Left(Exception):  # no error: the end of a stage
    """The forward has come to the end of the stage."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Arriving:
    """The hidden state that a stage has got, while its forward runs; and NaN, for what other stages compute."""

    __slots__ = ("absent", "hidden")

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.absent: Tensor | None = None  # None: made when it is needed


@dataclass(frozen=True)
class _Stage:
    """What a :class:`LayeredStage` holds besides the user's modules.

    Attributes:
        whole: the trimmed model, whose own state is registered with the stage under the same names.
        arriving: what that gets in the place of what other stages compute.
        layout: of the model's input.
        travels: of each tensor of the input, whether its values cross cuts.
        unlike: of its modules those that evaluate in training, and those that train in evaluation.
    """

    whole: nn.Module
    arriving: "_Arriving"
    layout: Layout | None
    travels: Sequence[bool]
    unlike: Sequence[Set[nn.Module]]
    is_first: bool
    is_last: bool


class LayeredStage(StageModule):
    """Units ``start`` to ``stop`` - 1 of a model: unit 0 is what comes before the layers, the last what comes behind.

    From the model's input, or from (hidden state, inputs), to (hidden state, inputs) or the model's result. Of an input
    that nothing behind unit 0 computes with, only the shape crosses.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, units: Sequence[str], start: int, stop: int, travels: Sequence[bool]
    ) -> None:
        """Take over from ``model`` the units ``start`` to ``stop`` - 1 of ``units``; ``travels``: which inputs do."""
        super().__init__(units[start:stop])
        arriving = _Arriving()
        whole = _trimmed(model, "", _Parts(anatomy, start, stop, len(units), arriving))
        self.training = model.training
        # Not registered itself, or all names would begin with its own: what it holds is registered here.
        self._modules, self._parameters, self._buffers = whole._modules, whole._parameters, whole._buffers
        vars(self)["_non_persistent_buffers_set"] = whole._non_persistent_buffers_set
        here = {module for one in self.modules() for module in (one, *_hidden(one).modules())}
        unlike = [modules & here for modules in anatomy.unlike]
        ends = {"is_first": start == 0, "is_last": stop == len(units)}
        vars(self)[_OWN] = _Stage(whole, arriving, anatomy.layout, tuple(travels), unlike, **ends)

    def forward(self, acts: Any) -> Any:
        """Return what crosses the next cut, or the model's result, of what crosses the previous one, or the input."""
        own: _Stage = vars(self)[_OWN]
        inputs = list(acts) if isinstance(acts, tuple) else [acts]
        hidden = None if own.is_first else inputs.pop(0)
        seen = tuple(
            tensor if own.is_first or travels else shape_proxy(tensor)
            for tensor, travels in zip(inputs, own.travels, strict=True)
        )
        own.arriving.hidden = hidden
        try:
            result = call(own.whole, seen[0] if own.layout is None else Several(seen, own.layout))
        except _Left as left:
            result = left.hidden
        finally:
            own.arriving.hidden = None
        if own.is_last:
            return result
        if own.is_first:
            inputs = [t if travels else shape_token(t) for t, travels in zip(inputs, own.travels, strict=True)]
        return (result, *inputs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as the model's own ``train()`` does, which may leave layers in the other mode."""
        super().train(mode)
        vars(self)[_OWN].whole.training = mode
        for module in vars(self)[_OWN].unlike[0 if mode else 1]:
            module.training = not mode
        return self


class _Parts:
    """What is on the stage of units ``start`` to ``stop`` - 1, of ``count``."""

    def __init__(self, anatomy: Anatomy, start: int, stop: int, count: int, arriving: _Arriving) -> None:
        self.anatomy, self.arriving = anatomy, arriving
        self.is_first, self.is_last = start == 0, stop == count
        self.layers = range(max(start - 1, 0), min(stop - 1, anatomy.count))
        self.enters = None if start == 0 else start - 1  # the layer that gets what has arrived
        self.leaves = None if stop == count else stop - 2  # the layer behind which the forward ends; -1: before all

    def holds(self, name: str) -> bool:
        """Return whether the module ``name``, none of the layers, is on this stage."""
        called = name in self.anatomy.before, name in self.anatomy.after
        return (self.is_first and called[0]) or (self.is_last and (called[1] or not called[0]))


def _trimmed(module: nn.Module, name: str, parts: _Parts) -> nn.Module:
    """Return ``module``, or what stands in its place on a stage."""
    anatomy = parts.anatomy
    is_list = name == anatomy.layers
    if is_list or not name or anatomy.layers.startswith(f"{name}.") or name in anatomy.around:
        twin = copy.copy(module)
        vars(twin).update(_parameters={**module._parameters}, _buffers={**module._buffers}, _modules={})
        for key, child in module._modules.items():
            inner = f"{name}.{key}".lstrip(".")
            if child is not None and is_list:
                twin._modules[key] = _Place(child, inner, len(twin._modules), parts)
            else:
                twin._modules[key] = child if child is None else _trimmed(child, inner, parts)
        return twin
    if parts.holds(name) or not (next(iter(module.state_dict()), None) or _may_draw(module)):
        return module
    return _Gone(module, name, parts)


def _may_draw(module: nn.Module) -> bool:
    return any("Drop" in type(one).__name__ for one in module.modules())


class _Replacing(nn.Module):
    """Stands for another module, and has the attributes of that."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["original"][0], name)


def _hidden(module: nn.Module) -> nn.Module:
    """Return the layer in whose place ``module`` stands, if that is here; else itself."""
    return vars(module)["original"][0] if isinstance(module, _Place) and module.is_here else module


class _Place(_Replacing):
    """A place in the list of layers, with or without its layer, whose state it has under the layer's own names."""

    def __init__(self, layer: nn.Module, name: str, index: int, parts: _Parts) -> None:
        super().__init__()
        anatomy = parts.anatomy
        is_here = index in parts.layers
        self.training = layer.training
        if is_here:
            self._modules, self._parameters, self._buffers = layer._modules, layer._parameters, layer._buffers
            vars(self)["_non_persistent_buffers_set"] = layer._non_persistent_buffers_set
        vars(self)["original"] = (layer if is_here else _without_memory(layer),)
        vars(self)["is_here"] = is_here
        vars(self)["at"] = anatomy.hidden
        vars(self)["results"] = tuple(results[name] for results in anatomy.results)
        vars(self)["arriving"] = parts.arriving
        # A layer that is here gets what has arrived; in front of the head, the last that is not here hands it on.
        enters = parts.enters == index or (parts.enters == anatomy.count == index + 1)
        leaves = parts.leaves == index or (parts.leaves == -1 and index == 0)
        vars(self)["enters"], vars(self)["leaves"] = enters, leaves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, if it is here; return what it returns, or leave the forward."""
        is_by_place = isinstance(self.at, int)
        hidden = args[self.at] if is_by_place else kwargs[self.at]
        if self.enters:
            hidden = self.arriving.hidden
        if self.is_here:
            if self.enters:
                args = (*args[: self.at], hidden, *args[self.at + 1 :]) if is_by_place else args
                kwargs = kwargs if is_by_place else {**kwargs, self.at: hidden}
            out = self.original[0](*args, **kwargs)
            if not self.leaves:
                return out
            result: Result = self.results[0 if self.training else 1]
            raise _Left(tree_leaves(out)[result.leaves.index(HERE)])
        if self.leaves:
            raise _Left(hidden)
        return self.results[0 if self.training else 1].build(lambda leaf: hidden if leaf is HERE else None)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layer, too."""
        super().train(mode)
        self.original[0].train(mode)
        return self


class _Gone(_Replacing):
    """Stands for a module that is called before or behind the layers, on a stage that does not hold it."""

    def __init__(self, module: nn.Module, name: str, parts: _Parts) -> None:
        super().__init__()
        self.training = module.training
        vars(self)["original"] = (_without_memory(module),)
        vars(self)["arriving"] = parts.arriving
        vars(self)["results"] = tuple(results.get(name) for results in parts.anatomy.results)
        vars(self)["is_even"] = parts.anatomy.is_even

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does, with tensors of NaN, which no value that is used depends on."""
        module, hidden = self.original[0], self.arriving.hidden
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        nan: Tensor | None = self.arriving.absent
        if nan is None:
            nan = torch.full((), math.nan, dtype=hidden.dtype, device=hidden.device)
        if isinstance(module, nn.Embedding) and first is not None:  # of any length
            return nan.expand(*first.shape, module.embedding_dim)
        if next(module.parameters(), None) is None:
            return first

        def tensor(shape: Shape) -> Tensor:
            # A hidden state of the length of this batch, not of the batches that were looked at.
            is_hidden = self.is_even and len(shape.sizes) == hidden.ndim - 1
            return nan.expand(hidden.shape if is_hidden else (len(hidden), *shape.sizes))

        result: Result | None = self.results[0 if self.training else 1]
        return first if result is None else result.build(tensor)


def _without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose tensors have shape and dtype, but no elements in memory."""
    twin = copy.copy(module)
    parameters = {
        key: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for key, p in module._parameters.items()
    }
    buffers = {key: b if b is None else torch.empty_like(b, device="meta") for key, b in module._buffers.items()}
    children = {key: child if child is None else _without_memory(child) for key, child in module._modules.items()}
    vars(twin).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return twin


_LIKE = {"zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty"}  # take a tensor for its shape


class _Following(TorchFunctionMode):
    """Follows tensors through a forward: which results depend on their values, and whether Python asks for these."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = [*tensors]  # so that no id is used a second time
        self.sources: dict[int, Set[int]] = {id(tensor): {place} for place, tensor in enumerate(tensors)}
        self.asked: set[int] = set()

    def of(self, value: Any) -> set[int]:
        """Return the places of the tensors that ``value`` depends on."""
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        return {place for tensor in tensors for place in self.sources.get(id(tensor), ())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name in ABOUT_TENSORS or name in _LIKE or not (found := self.of((args, kwargs))):
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            results.append(args[0])
        for tensor in results:
            self._kept.append(tensor)
            self.sources[id(tensor)] = found | set(self.sources.get(id(tensor), ()))
        if not results:
            self.asked |= found
        return out


def travelling(model: nn.Module, anatomy: Anatomy, units: Sequence[str], sample: Batch) -> list[bool]:
    """Return of each tensor of the input whether anything behind unit 0 computes with its values.

    Raises:
        PartitionError: something there computes with what comes before the layers, or fails without it.
    """
    inputs, needed = tensors_of(sample), set[int]()
    hidden = anatomy.pairs[0][0].detach()
    absent = hidden.new_full((), math.nan)
    refused = f"{type(model).__name__} cannot be cut at the layers of '{anatomy.layers}': "
    with state_kept(model), modes_kept(model), streams_kept(hidden.device if hidden.is_cuda else None):
        for mode in (True, False):
            model.train(mode)
            stage = LayeredStage(model, anatomy, units, 1, len(units), [True] * len(inputs))
            vars(stage)[_OWN].arriving.absent = absent
            following = _Following([*inputs, absent])
            try:
                with torch.no_grad(), following:
                    out = stage((hidden, *inputs))
            except Exception as error:  # the model's own code can raise anything
                why = in_one_line(error)[:200]
                raise PartitionError(
                    f"{refused}without the modules that it calls before them its forward fails ({why}); use "
                    "partition.num_stages=1"
                ) from error
            needed |= following.of(out) | following.asked
    if len(inputs) in needed:
        raise PartitionError(
            f"{refused}besides the hidden state that they get, its forward computes with values of modules that are "
            "called before them, which later stages do not have; use partition.num_stages=1"
        )
    return [place in needed for place in range(len(inputs))]
