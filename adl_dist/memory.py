"""Where tensors lie in memory, and which of them share some."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` lie at an address of their own, one stride apart."""
    if is_lazy(tensor) or tensor.is_meta:
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def memory_of(tensor: Tensor) -> Hashable:
    """Return what two tensors of one storage have in common; of one without plain memory its id."""
    address = tensor.untyped_storage().data_ptr() if has_plain_memory(tensor) else 0
    return ("memory", address) if address else id(tensor)


def storage_of(tensor: Tensor) -> Hashable:
    """Return what two tensors of one storage have in common while both are there, also on meta; else the id."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:  # a class of tensors that has none
        return id(tensor)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor with elements and plain memory, and the first behind it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def shared_memory(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return, by the id of each tensor, a number that it has in common with those whose spans overlap its own.

    Tensors without elements, or without plain memory, are not in it.
    """
    numbers: dict[int, int] = {}
    number, reach, device = 0, 0, ""
    placed = {id(t): t for t in tensors if has_plain_memory(t) and t.numel()}
    for where, (start, end), key in sorted((str(t.device), span(t), key) for key, t in placed.items()):
        if where != device or start >= reach:
            number, reach, device = number + 1, end, where
        reach = max(reach, end)
        numbers[key] = number
    return numbers
