"""The values of tensors on ``torch.device("meta")`` that depend on no weight: of the samples, of masks, of positions.

A forward that runs on meta has no values, but may ask for some: whether a mask masks anything, whether positions count
up. Each tensor that is computed from real ones alone is therefore computed a second time, on the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from adl_dist.training.trial.operations import written_by

MOST_ELEMENTS = 2**20  # of a tensor that is computed a second time
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # have no values


class KnownValues(TorchDispatchMode):
    """Computes inside what depends on real tensors alone, and answers what a forward asks of such a tensor on meta."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakTensorKeyDictionary()  # from a tensor on meta to its values
        self._lost: set[int] = set()  # memory of values that something unknown was written to
        self._kept: list[Tensor] = []  # so that no address of these is used a second time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = {id(tensor): self._value(tensor) for tensor in given}
        is_known = None not in values.values()
        if func is torch.ops.aten._local_scalar_dense.default and is_known and given[0].is_meta:
            return values[id(given[0])].item()  # type: ignore[union-attr]
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in made):
            return out
        if is_known and self._is_computed(func, made):
            of_known = tree_map(lambda leaf: _off_meta(leaf, values), (args, kwargs))
            again = [leaf for leaf in tree_leaves(func(*of_known[0], **of_known[1])) if isinstance(leaf, Tensor)]
            for tensor, value in zip(made, again, strict=True):
                self._known[tensor] = value
        else:
            for tensor in written_by(func, args, kwargs):
                if tensor in self._known:
                    self._kept.append(self._known[tensor])
                    self._lost.add(self._known[tensor].untyped_storage()._cdata)
        return out

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor; None: they are not known."""
        if not tensor.is_meta:
            return tensor
        value: Tensor | None = self._known.get(tensor)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    @staticmethod
    def _is_computed(func: Any, made: list[Tensor]) -> bool:
        name = func._schema.name.partition("::")[2]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        return not is_drawn and name not in EMPTY and all(tensor.numel() <= MOST_ELEMENTS for tensor in made)


def _off_meta(leaf: Any, values: dict[int, Tensor | None]) -> Any:
    """Return what stands for an argument where there are values."""
    if isinstance(leaf, Tensor):
        return values[id(leaf)]
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf
