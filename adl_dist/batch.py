"""What a dataset yields as an input or a target, where that is more than one tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """How several tensors stand together: in a tuple of so many, or in a dictionary under ``names``."""

    count: int
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, value: tuple[Any, ...] | Mapping[str, Any]) -> "Layout":
        """Return the layout of a tuple or a dictionary."""
        return cls(len(value), tuple(value) if isinstance(value, Mapping) else None)

    def build(self, tensors: Tensors) -> "Several":
        """Return ``tensors`` in this layout."""
        return Several(tensors, self)

    def split(self, tensors: Tensors) -> tuple["Several", Tensor | None]:
        """Return the first of ``tensors`` in this layout, and the one behind them, if there is one."""
        rest = tensors[self.count :]
        return Several(tensors[: self.count], self), rest[0] if rest else None

    def __str__(self) -> str:
        return "{" + ", ".join(self.names) + "}" if self.names is not None else f"a tuple of {self.count}"


class Several:
    """Tensors [B, ...] of one batch in the place of one: as many samples each. It answers what a batch is asked for."""

    __slots__ = ("layout", "tensors")
    ndim = 0  # no tensor of classes, nor of images

    def __init__(self, tensors: Tensors, layout: Layout) -> None:
        self.tensors, self.layout = tensors, layout

    @classmethod
    def of(cls, value: tuple[Tensor, ...] | Mapping[str, Tensor]) -> "Several":
        """Return the tensors of a tuple or a dictionary."""
        return cls(tuple(value.values()) if isinstance(value, Mapping) else value, Layout.of(value))

    @property
    def value(self) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """The tuple or dictionary itself."""
        names = self.layout.names
        return self.tensors if names is None else dict(zip(names, self.tensors, strict=True))

    @property
    def arguments(self) -> tuple[Tensors, dict[str, Tensor]]:
        """The arguments of a call with them: a tuple's by their places, a dictionary's by their names."""
        names = self.layout.names
        return (self.tensors, {}) if names is None else ((), dict(zip(names, self.tensors, strict=True)))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Several":
        """Return what ``function`` makes of each tensor."""
        return Several(tuple(function(tensor) for tensor in self.tensors), self.layout)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> "Several":
        return self.map(lambda tensor: tensor[rows])

    def to(self, *args: Any, **kwargs: Any) -> "Several":
        """Do as :meth:`torch.Tensor.to` with each."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def cpu(self) -> "Several":
        """Copy each to the CPU."""
        return self.map(Tensor.cpu)

    def clone(self) -> "Several":
        """Copy each."""
        return self.map(torch.clone)

    def contiguous(self) -> "Several":
        """Return each in the plain memory format."""
        return self.map(Tensor.contiguous)

    def pin_memory(self) -> "Several":
        """Copy each to pinned memory."""
        return self.map(Tensor.pin_memory)

    def is_floating_point(self) -> bool:
        """Whether it is certainly no tensor of whole numbers, which could be classes: always."""
        return True

    @property
    def device(self) -> torch.device:
        """The device of all of them."""
        return self.tensors[0].device

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a GPU."""
        return self.tensors[0].is_cuda

    @property
    def _version(self) -> int:
        return max(tensor._version for tensor in self.tensors)

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(tuple(tensor.clone() for tensor in self.tensors), self.layout)


Batch = Tensor | Several  # an input or a target of some samples


def tensors_of(batch: Batch) -> Tensors:
    """Return the tensors of an input or a target."""
    return batch.tensors if isinstance(batch, Several) else (batch,)


def as_classes(target: Tensor) -> Tensor:
    """Return whole numbers as int64: in 8 bits without a sign -100, which losses ignore, is the class 156."""
    return target.long()


def detached(value: Any) -> Any:
    """Return tensors in any containers without what leads to them, and without a copy."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def layout_of(batch: Batch) -> Layout | None:
    """Return the layout of an input or a target; None: it is one tensor."""
    return batch.layout if isinstance(batch, Several) else None


def mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return what ``function`` makes of each tensor of an input or a target."""
    return batch.map(function) if isinstance(batch, Several) else function(batch)


def put_together(one: Batch, other: Batch) -> Batch:
    """Return the samples of two batches of one layout together."""
    if isinstance(one, Several) and isinstance(other, Several):
        return Several(tuple(map(_joined, one.tensors, other.tensors)), one.layout)
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    return _joined(one, other)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one, other])


def call(function: Callable[..., Any], argument: Any) -> Any:
    """Call a model, or a part of it: with ``argument``, or with the tensors of an input that has several."""
    if type(argument) is not Several:
        return function(argument)
    args, kwargs = argument.arguments
    return function(*args, **kwargs)
