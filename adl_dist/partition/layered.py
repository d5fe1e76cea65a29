"""What a model does around a list of layers that its forward calls one after the other, found by watching it run.

For models whose forward cannot be read by torch.fx, or need not be: nothing in it is taken apart.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from adl_dist.batch import Batch, Layout, call, layout_of
from adl_dist.errors import PartitionError, in_one_line
from adl_dist.partition.module_state import modes_kept
from adl_dist.partition.ran import Samples, run


class Hidden(Enum):
    """Stands for the hidden state in what a layer returns; a copy of it is itself."""

    HERE = "here"


HERE = Hidden.HERE


@dataclass(frozen=True)
class Shape:
    """Stands for a tensor [B, ...] in what a module returns."""

    sizes: tuple[int, ...]  # without the batch


@dataclass(frozen=True)
class Result:
    """What a module returned, with :data:`HERE` and a :class:`Shape` in the place of tensors."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(cls, value: Any, hidden: Tensor | None = None) -> "Result":
        """Take what was returned; ``hidden``: the tensor in it that the next layer gets."""
        leaves, tree = tree_flatten(value)
        return cls(tuple(_stand_in(leaf, hidden) for leaf in leaves), tree)

    def build(self, make: Callable[[Any], Any]) -> Any:
        """Return the same structure, with what ``make`` gives for each that stands for a tensor."""
        stands = [make(leaf) if leaf is HERE or isinstance(leaf, Shape) else leaf for leaf in self.leaves]
        return tree_unflatten(stands, self.tree)


@dataclass(frozen=True)
class Anatomy:
    """A model around its layers.

    Attributes:
        layers: the name of the list of layers.
        count: how many these are.
        hidden: where a layer takes the hidden state: by place (0) or by this name.
        layout: of the model's input; None: it is one tensor.
        before: modules that are called before the first layer, not those inside of them.
        after: likewise, behind the last.
        around: modules in whose forwards the layers are called; the model itself is "".
        results: what each layer returns, and each module of ``before``, by name: in training and in evaluation.
        is_even: whether the hidden state has one shape all the way.
        pairs: the hidden state in front of each layer, and behind the last, for two batches.
        moved: the ids of buffers that the forward moves.
        unlike: modules that the model's own ``train()`` leaves in evaluation, and those that it leaves in training.
    """

    layers: str
    count: int
    hidden: int | str
    layout: Layout | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    around: frozenset[str]
    results: tuple[Mapping[str, Result], Mapping[str, Result]]
    is_even: bool
    pairs: tuple[tuple[Tensor, Tensor], ...]
    moved: frozenset[int]
    unlike: tuple[Set[nn.Module], Set[nn.Module]] = (frozenset(), frozenset())


def look(model: nn.Module, layers: str, samples: Samples) -> Anatomy:
    """Run ``model`` on two batches, in training and in evaluation; what it moves is put back.

    Raises:
        PartitionError: its forward does not call the ``layers`` one after the other, each with what the one before has
            returned and nothing else that takes a gradient; or a module around them has parameters of its own.
    """
    seen, unlike = list[_Watch](), list[Set[nn.Module]]()
    moved: frozenset[int] = frozenset()
    with modes_kept(model):
        for mode in (True, False):
            model.train(mode)
            unlike.append({module for module in model.modules() if module.training != mode})
            watches = [_Watch(model, layers) for _ in samples]
            with torch.set_grad_enabled(mode):
                arguments: Any = tuple(((watch, sample), {}) for watch, sample in zip(watches, samples, strict=True))
                ran = run(partial(_watched, model), arguments, modules=[model])
            seen, moved = [*seen, *watches], moved | ran.moved
    return replace(_anatomy(model, layers, samples, seen, moved), unlike=(unlike[0], unlike[1]))


def _watched(model: nn.Module, watch: "_Watch", sample: Batch) -> None:
    try:
        with watch.watching():
            call(model, sample)
    except PartitionError:
        raise
    except Exception as error:  # the model's own code can raise anything
        raise PartitionError(
            f"{type(model).__name__} fails on a batch of the data: {in_one_line(error)[:200]}"
        ) from error
    watch.check_end()


def _anatomy(model: nn.Module, layers: str, samples: Samples, seen: "list[_Watch]", moved: frozenset[int]) -> Anatomy:
    one, other = seen[0], seen[1]
    before, after, around = (
        tuple(dict.fromkeys(name for watch in seen for name in names(watch)))
        for names in (_Watch.before, _Watch.after, _Watch.around)
    )
    for first, second in ((seen[0], seen[1]), (seen[2], seen[3])):
        for name in first.results.keys() | second.results.keys():
            if first.results.get(name) != second.results.get(name):
                raise PartitionError(
                    f"{type(model).__name__}: what '{name}' returns differs between two batches of the data not only "
                    "in the values of tensors, so no stage can do without it; use partition.num_stages=1"
                )
    for name in around:
        holder = model.get_submodule(name)
        own = [*holder._parameters, *(key for key in holder._buffers if key not in holder._non_persistent_buffers_set)]
        own = [key for key in own if getattr(holder, key) is not None]
        if own:
            raise PartitionError(
                f"{type(model).__name__}: '{f'{name}.{own[0]}'.lstrip('.')}' is held by the module that calls the "
                f"layers of '{layers}', so it is not known which stage it belongs to; use partition.num_stages=1"
            )
    shapes = {tuple(hidden.shape[1:]) for hidden in one.hidden}
    return Anatomy(
        layers=layers,
        count=one.count,
        hidden=one.takes_at,
        layout=layout_of(samples[0]),
        before=before,
        after=after,
        around=frozenset(around),
        results=(seen[0].results, seen[2].results),
        is_even=len(shapes) == 1,
        pairs=tuple(zip(one.hidden, other.hidden, strict=True)),
        moved=moved,
    )


@dataclass
class _Called:
    """A call of a module that is no layer: how many layers had been called before it, and when it returned."""

    name: str
    within: "_Called | None"
    entered: int
    left: int = -1
    result: Result | None = None

    @property
    def is_around(self) -> bool:
        return self.left > self.entered


class _Watch:
    """Watches one forward."""

    def __init__(self, model: nn.Module, layers: str) -> None:
        self._model, self._layers = model, layers
        self._list = [*model.get_submodule(layers).children()]
        self.count = len(self._list)
        self.calls: list[_Called] = []
        self.hidden: list[Tensor] = []  # in front of each layer that was called, and behind the last
        self.takes_at: int | str = 0
        self.results: dict[str, Result] = {}
        self._open: list[_Called] = []
        self._out: Any = None

    def before(self) -> list[str]:
        return [c.name for c in self._outside() if c.left == 0]

    def after(self) -> list[str]:
        return [c.name for c in self._outside() if c.entered == self.count]

    def around(self) -> list[str]:
        return [c.name for c in self.calls if c.is_around]

    def _outside(self) -> Iterator[_Called]:
        """Yield the calls around which no layer is called, and that are not inside of another such call."""
        return (c for c in self.calls if not c.is_around and (c.within is None or c.within.is_around))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have hooks on all modules but the parts of layers."""
        handles = []
        try:
            for name, module in self._model.named_modules():
                if module in self._list:
                    place = self._list.index(module)
                    handles.append(
                        module.register_forward_pre_hook(partial(self._enter_layer, place), with_kwargs=True)
                    )
                    handles.append(module.register_forward_hook(partial(self._leave_layer, place)))
                elif not name.startswith(f"{self._layers}."):
                    handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                    handles.append(module.register_forward_hook(self._leave))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.calls.append(_Called(name, self._open[-1] if self._open else None, len(self.hidden)))
        self._open.append(self.calls[-1])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        called = self._open.pop()
        called.left = len(self.hidden)
        if called.left == 0:
            self.results[called.name] = Result.of(out)

    def _enter_layer(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if place != len(self.hidden):
            raise self._refused(
                f"calls layer {place} where layer {len(self.hidden)} is expected; a layer that is called twice, or out "
                "of order, cannot be on a stage of its own"
            )
        given = {**dict(enumerate(args)), **kwargs}
        at, hidden = next(((key, value) for key, value in given.items() if isinstance(value, Tensor)), (0, None))
        if hidden is None or (place and at != self.takes_at):
            raise self._refused(f"calls layer {place} with no tensor where the others take theirs")
        if place and not any(leaf is hidden for leaf in tree_leaves(self._out)):
            raise self._refused(f"computes something between layer {place - 1} and layer {place}")
        others = {key: value for key, value in given.items() if key != at}
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(others)):
            raise self._refused(
                f"gives layer {place} a second tensor that takes a gradient, which stages would not send back"
            )
        if place:
            self.results[f"{self._layers}.{place - 1}"] = Result.of(self._out, hidden)
        self.takes_at = at
        self.hidden.append(hidden)

    def _leave_layer(self, place: int, module: nn.Module, args: Any, out: Any) -> None:
        self._out = out

    def check_end(self) -> None:
        """Note what the last layer has returned, and refuse a forward that has not called all of them."""
        if len(self.hidden) != self.count:
            raise self._refused(f"calls {len(self.hidden)} of its {self.count} layers")
        if any(not c.is_around and 0 < c.entered < self.count for c in self.calls):
            name = next(c.name for c in self.calls if not c.is_around and 0 < c.entered < self.count)
            raise self._refused(f"calls '{name}' between two layers")
        last = next((leaf for leaf in tree_leaves(self._out) if isinstance(leaf, Tensor)), None)
        if last is None:
            raise self._refused("gets no tensor from its last layer")
        self.results[f"{self._layers}.{self.count - 1}"] = Result.of(self._out, last)
        self.hidden.append(last)

    def _refused(self, what: str) -> PartitionError:
        return PartitionError(
            f"{type(self._model).__name__} cannot be cut at the layers of '{self._layers}': its forward {what}; use "
            "partition.num_stages=1"
        )


def _stand_in(leaf: Any, hidden: Tensor | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return HERE if leaf is hidden else Shape(tuple(leaf.shape[1:]))
