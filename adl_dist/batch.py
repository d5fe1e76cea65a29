"""Batches: one tensor [B, ...], or a tuple or dictionary of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_map_only

Tensors = tuple[Tensor, ...]
Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Structure = TreeSpec


def tensors_of(batch: Batch) -> Tensors:
    """Return the tensors of an input or a target."""
    return (batch,) if isinstance(batch, Tensor) else tuple(tree_leaves(batch))


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    if one.shape != other.shape:
        return False
    one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def version_of(tensor: Tensor) -> int:
    """Return the version counter of ``tensor``; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def num_samples(batch: Batch) -> int:
    """Return the number of samples: the size of the first dimension."""
    return len(tensors_of(batch)[0])


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply ``function`` to each tensor of an input or a target."""
    return function(batch) if isinstance(batch, Tensor) else map_tensors(function, batch)


def copy_batch(batch: Batch) -> Batch:
    """Return copies of the tensors, for code that may write to them."""
    return map_batch(Tensor.clone, batch)


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Return the samples of a batch that the index ``rows`` selects."""
    return map_batch(lambda tensor: tensor[rows], batch)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return an input or a target on ``device``; copy asynchronously."""
    return map_batch(lambda tensor: tensor.to(device, non_blocking=True), batch)


def device_of(batch: Batch) -> torch.device:
    """Return the device of an input or a target."""
    return tensors_of(batch)[0].device


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to each tensor in ``value``; keep other leaves."""
    return tree_map_only(Tensor, function, value)


def logits_of(out: Any) -> Tensor | None:
    """Return the first tensor of an output that has dimensions, or None."""
    return next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.ndim), None)


def is_class_target(target: Batch) -> bool:
    """Return whether ``target`` is one tensor that may hold classes."""
    return isinstance(target, Tensor) and not target.is_floating_point()


def as_classes(target: Tensor) -> Tensor:
    """Return class labels as int64.

    In uint8, which losses accept as well, their ``ignore_index`` -100 equals class 156.
    """
    return target.long()


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as (args, kwargs); a dictionary becomes the kwargs."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if type(batch) is tuple else (batch,)), {}


def call(function: Callable[..., Any], batch: Any) -> Any:
    """Call a model, or a part of it, with an input."""
    args, kwargs = arguments_of(batch)
    return function(*args, **kwargs)


def describe_structure(structure: Structure) -> str:
    """Return text with the names or the number of tensors in ``structure``."""
    if structure.type is dict:
        return "{" + ", ".join(structure.context) + "}"
    return "a tensor" if structure.is_leaf() else f"a tuple of {structure.num_children}"


def describe_names(batch: Batch) -> str:
    """Return the names of the tensors in a dictionary, like `` as ids, mask``."""
    return f" as {', '.join(batch)}" if isinstance(batch, dict) else ""


def concatenate(one: Batch, other: Batch) -> Batch:
    """Concatenate the samples of two batches of the same structure."""
    joined: Batch = tree_map(lambda *pair: torch.cat(pair), one, other)
    return joined
