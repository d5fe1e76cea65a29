"""Addresses of tensors in memory, and memory that several tensors share."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` have addresses."""
    if is_lazy(tensor) or tensor.is_meta:
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share while they exist."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # a class of tensors without such memory, or no shape yet
        return id(tensor)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the address after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
