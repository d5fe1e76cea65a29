"""How a module is called: one tensor or several, seeded, and what it may do to what it is given."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Tensors = tuple[Tensor, ...]


def packed(tensors: Tensors) -> Any:
    """What a unit of an ``nn.Sequential`` is called with: a tensor, or a tuple of several."""
    return tensors[0] if len(tensors) == 1 else tensors


def unpacked(out: Any) -> Tensors:
    """What a unit returned, as a tuple of tensors; they may stand in tuples, lists and dictionaries."""
    return (out,) if isinstance(out, Tensor) else tuple(tree_leaves(out))


def takes_gradient(tensor: Tensor) -> bool:
    """Whether a gradient comes back for it."""
    return tensor.is_floating_point() or tensor.is_complex()


def torch_seed(seed: int, device: torch.device) -> None:
    """Seed the generator that random operations on ``device`` draw from, and no other."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
