"""Runs a part of a model on two batches of different sizes, and leaves everything but the results as it was."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from adl_dist.batch import Batch
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.nodes import ABOUT_TENSORS
from adl_dist.streams import Streams

_LIKE_ANOTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # ask their second argument for its shape
_NEW = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"}
Pair = tuple[Any, Any]  # a value of the forward for each of the two batches
Samples = tuple[Batch, Batch]  # inputs of 2 and of 4 samples, say; each a tensor, or several


@dataclass(frozen=True)
class Ran:
    """What two calls did.

    Attributes:
        values: what they returned.
        uses: tensors without a history, like parameters, that gradients of the first result reach, wherever they lie.
        moved: the ids of buffers that they wrote to, or put others in the place of.
        moves_state: whether they moved anything that can be seen.
        draws: whether they drew random numbers.
    """

    values: Pair
    uses: Sequence[Tensor] = ()
    moved: frozenset[int] = frozenset()
    moves_state: bool = False
    draws: bool = False


def run(call: Callable[..., Any], arguments: tuple[Pair, Pair], *, modules: Sequence[nn.Module] = ()) -> Ran:
    """Call twice, with (args, kwargs) for each batch; what it moves, of ``modules`` and random streams, is put back.

    Without ``modules`` it is taken for a function that has no state, and draws from torch's streams only.
    """
    device = next((t.device for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.is_cuda), None)
    streams = Streams() if any(not is_of_torch(module) for module in modules) else None
    of_torch = _torch_streams(device)
    state = ModuleState.of(*modules, only_registered=all(map(is_plain_of_torch, modules)))
    buffers = [(b, b._version, b.detach().clone(), owner, key) for owner, key, b in _buffers(modules)]
    history = _history(arguments[0])
    try:
        first, second = (call(*args, **kwargs) for args, kwargs in arguments)
        moved = frozenset(
            id(buffer)
            for buffer, version, kept, owner, key in buffers
            if owner._buffers.get(key) is not buffer
            or buffer._version != version
            or not (buffer.is_meta or torch.equal(buffer, kept))
        )
        draws = any(map(_differ, of_torch, _torch_streams(device))) or bool(streams and streams.moved())
        return Ran((first, second), _reached(first, history), moved, bool(moved or state.changes()), draws)
    finally:
        state.restore()
        _put_back(of_torch, device)
        if streams is not None:
            streams.restore()


def is_same(ran: Ran, module: nn.Module) -> bool:
    """Return whether a module without parameters made the same of both batches, and moved and drew nothing."""
    if ran.moves_state or ran.draws or ran.uses or next(module.parameters(), None) is not None:
        return False
    tensors = [leaf for leaf in tree_leaves(ran.values) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors) and same_values(ran.values)


def same_values(pair: Pair) -> bool:
    """Return whether both hold the same numbers in the same places."""
    (first, tree), (second, other) = map(tree_flatten, pair)
    return tree == other and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(first, second, strict=True)
    )


class ValuesAskedForError(Exception):
    """More than the shape of a tensor was asked for."""


class _ShapeOnly(Tensor):
    """A tensor that answers what its shape, dtype and device are, and nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        is_other = not isinstance(args[0], _ShapeOnly) and name in _LIKE_ANOTHER
        if name not in ABOUT_TENSORS and name not in _NEW and not is_other:
            raise ValuesAskedForError(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def shape_only(value: Any) -> Any:
    """Return a tensor in the place of ``value`` that does not tell its values; anything else as it is."""
    return value.detach().as_subclass(_ShapeOnly) if isinstance(value, Tensor) else value


def is_of_torch(module: nn.Module) -> bool:
    """Return whether it is one of torch's own layers, and holds no other."""
    return type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None


def is_plain_of_torch(module: nn.Module) -> bool:
    """Return whether it is one of torch's own layers, and has no hooks: it moves nothing but what it has registered."""
    return is_of_torch(module) and not (module._forward_pre_hooks or module._forward_hooks)


def _buffers(modules: Iterable[nn.Module]) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        for owner in module.modules():
            yield from ((owner, key, b) for key, b in owner._buffers.items() if b is not None)


def _torch_streams(device: torch.device | None) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device is not None else [])]


def _put_back(states: Sequence[Tensor], device: torch.device | None) -> None:
    torch.set_rng_state(states[0])
    if device is not None:
        torch.cuda.set_rng_state(states[1], device)


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)


def _history(arguments: Any) -> set[Any]:
    """Return where the graphs of ``arguments`` end: behind it lies what earlier steps did.

    A write to a view puts another step behind the tensor that it is a view of, whose history counts, therefore, too.
    """
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    return {t.grad_fn for t in tensors} | {t._base.grad_fn for t in tensors if t._base is not None}


def _reached(value: Any, history: set[Any]) -> list[Tensor]:
    """Return the tensors at the ends of the graph of ``value``, up to the ``history`` of what it was computed from."""
    reached: list[Tensor] = []
    waiting: list[Any] = [t.grad_fn for t in tree_leaves(value) if isinstance(t, Tensor)]
    seen: set[Any] = {None, *history}
    while waiting:
        step = waiting.pop()
        if step in seen:
            continue
        seen.add(step)
        if (variable := getattr(step, "variable", None)) is not None:
            reached.append(variable)
        waiting += [source for source, _ in step.next_functions]
    return reached
