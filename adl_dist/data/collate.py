"""The input and target of a micro-batch, from its samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from adl_dist.batch import Batch, copy_batch, tensors_of
from adl_dist.data.stream import own_code
from adl_dist.errors import DataError

Pair = tuple[Batch, Batch]  # an input and a target


def stacked(samples: Sequence[Pair], indices: Sequence[int]) -> Pair:
    """Stack ``samples`` to input [B, ...] and target [B, ...].

    Raises:
        DataError: If two samples differ in shape, dtype or containers.
    """
    first = samples[0]
    for index, sample in zip(indices[1:], samples[1:], strict=True):
        if not all(map(_is_alike, sample, first)):
            raise DataError(
                f"sample {index}: expected {_described(first)} like sample {indices[0]} of the same micro-batch, got "
                f"{_described(sample)}; add a transform that gives all samples one shape and dtype, or a collate_fn "
                "that pads them"
            )
    input_, target = (_stack([sample[part] for sample in samples]) for part in (0, 1))
    return input_, target


def collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any], indices: Sequence[int]) -> Pair:
    """Call ``collate_fn``; return input [B, ...] and target [B, ...].

    Raises:
        DataError: If ``collate_fn`` raises, or returns something else.
    """
    where = f"collate_fn, for {len(samples)} samples from sample {indices[0]} on,"
    with own_code(where):
        made = collate_fn(samples)
    pair = as_pair(made, f"{where} returned:")
    for tensor in (*tensors_of(pair[0]), *tensors_of(pair[1])):
        if tensor.shape[:1] != (len(samples),):
            raise DataError(f"{where} returned a tensor {list(tensor.shape)}; its first dimension must be the samples")
    # Copies, because it may reuse its memory for the next micro-batch while stages still compute with this one.
    return copy_batch(pair[0]), copy_batch(pair[1])


def as_pair(value: Any, where: str) -> Pair:
    """Convert a sample, or a collated micro-batch, to input and target.

    Raises:
        DataError: If ``value`` is not a pair of tensors or numbers, or of tuples or dictionaries of these.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(
            f"{where} expected a pair (input, target), got {_kind(value)}; let the dataset's __getitem__, or "
            "collate_fn, return two values; an input or a target of several tensors is a tuple or a dictionary of them"
        )
    return _as_batch(value[0], "an input", where), _as_batch(value[1], "a target", where)


def _as_batch(value: Any, what: str, where: str) -> Batch:
    if isinstance(value, Mapping | tuple) and len(value):
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) and name.isidentifier() for name in value):
                raise DataError(f"{where} expected {what} whose keys are names of arguments, got {list(value)}")
            return {name: _as_tensor(part, what, where) for name, part in sorted(value.items())}  # in any order
        return tuple(_as_tensor(part, what, where) for part in value)
    return _as_tensor(value, what, where)


def _as_tensor(value: Any, what: str, where: str) -> Tensor:
    if isinstance(value, Tensor):  # torchvision's images are a subclass with its own rules
        return value if type(value) is Tensor else value.as_subclass(Tensor)
    if isinstance(value, int | float):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        # A copy: torch takes no flipped, read-only or foreign-endian array.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    way_out = "add a transform that converts it, for example torchvision's ToTensor for images"
    if isinstance(value, list):
        way_out = "make one tensor of it, by torch.tensor of numbers, by torch.stack of tensors"
    raise DataError(
        f"{where} expected {what} that is a tensor, a numeric numpy array or a number, or a tuple or a dictionary of "
        f"these, got {_type_name(value)}; {way_out}"
    )


def _stack(parts: Sequence[Batch]) -> Batch:
    columns = zip(*map(tensors_of, parts), strict=True)
    return tree_unflatten(map(torch.stack, columns), tree_structure(parts[0]))  # type: ignore[no-any-return]


def _is_alike(one: Batch, other: Batch) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    if tree_structure(one) != tree_structure(other):
        return False
    return all(map(_is_alike, tensors_of(one), tensors_of(other)))


def _described(sample: Pair) -> str:
    return f"(input {described(sample[0])}, target {described(sample[1])})"


def described(batch: Batch) -> str:
    """Return dtype and shape of an input or a target, for messages."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{name}: {described(tensor)}" for name, tensor in batch.items()) + "}"
    return f"({', '.join(map(described, batch))})"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else _type_name(value)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
