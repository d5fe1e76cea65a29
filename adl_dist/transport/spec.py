"""The tensors that travel on an edge, agreed once at start-up."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from adl_dist.errors import PartitionError

SAME_EACH_TIME = (
    "what crosses a cut may change its length only if the first samples, up to 64, have several: let them differ, pad "
    "all to one length, or cut elsewhere (partition.balance)"
)
VARIES = -1  # stands for a size that changes from one micro-batch to another


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and layout in memory of one tensor, without its batch size."""

    shape: tuple[int, ...]  # of one sample, without the batch dimension; of the whole tensor unless ``batched``
    dtype: str  # torch's name, for example "float32"
    order: tuple[int, ...] = ()  # of its dimensions in memory, like (0, 2, 3, 1) of channels_last; (): as they are
    gets_gradient: bool = True  # whether a gradient comes back for it, if its dtype allows one
    batched: bool = True  # whether its first dimension is the batch

    @classmethod
    def of(cls, tensor: Tensor, *, batched: bool = True) -> "TensorSpec":
        """Return the spec of ``tensor`` [B, ...].

        A transposed tensor keeps its order in memory, if it is dense and begins with the batch, because kernels are
        chosen by strides, and round differently.
        """
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
        is_kept = batched and not tensor.is_contiguous() and order[0] == 0 and tensor.permute(order).is_contiguous()
        shape = tuple(tensor.shape[int(batched) :])
        return cls(shape, _name(tensor.dtype), order if is_kept else (), batched=batched)

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the tensor for ``num_samples``."""
        return (num_samples, *self.shape) if self.batched else self.shape

    def empty(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """Return an uninitialised tensor of ``size`` samples."""
        sizes = self.sizes(size)
        stored = [sizes[d] for d in self.order] if self.order else sizes
        made = torch.empty(stored, dtype=self._dtype, device=device, pin_memory=pinned)
        return made.permute([self.order.index(d) for d in range(made.ndim)]) if self.order else made

    def fit(self, tensor: Tensor, size: int, where: Callable[[], str]) -> Tensor:
        """Return ``tensor`` in this format, converted only if necessary.

        Raises:
            PartitionError: If shape or dtype differ from the agreed ones; the text begins with the result of ``where``.
        """
        if tensor.shape != self.sizes(size) or tensor.dtype != self._dtype:
            raise PartitionError(
                f"{where()} is {_name(tensor.dtype)}{list(tensor.shape)}, expected {self.dtype}{[*self.sizes(size)]}, "
                f"as in the trial at the start; {SAME_EACH_TIME}"
            )
        if tensor.requires_grad:
            tensor = tensor.detach()
        # Strides of dimensions of size 1 are free, and kernels are chosen by strides. A peer in this process must get
        # the same strides as a peer in another process, or bits could differ.
        if tensor.stride() == self._strides:
            return tensor
        return self.empty(size, tensor.device).copy_(tensor)

    def as_wire(self, tensor: Tensor) -> Tensor:
        """Return a contiguous view of real numbers, which gloo accepts."""
        plain = tensor.permute(self.order) if self.order else tensor
        return torch.view_as_real(plain) if self._dtype.is_complex else plain

    @cached_property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        sizes = self.sizes(1)
        order = self.order or range(len(sizes))
        return tuple(math.prod(sizes[later] for later in order[order.index(d) + 1 :]) for d in range(len(sizes)))

    @cached_property
    def varies(self) -> bool:
        """Whether a size varies, so that each message has a header; see wire.py."""
        return VARIES in self.shape

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._dtype.itemsize

    @property
    def is_floating_point(self) -> bool:
        """Whether the elements are real numbers."""
        return self._dtype.is_floating_point

    @property
    def takes_gradient(self) -> bool:
        """Whether a gradient comes back for the tensor."""
        return self.gets_gradient and (self.is_floating_point or self._dtype.is_complex)

    def __str__(self) -> str:
        sizes = ["?" if size == VARIES else str(size) for size in self.shape]
        return f"{self.dtype}[{', '.join(['B', *sizes] if self.batched else sizes)}]"


def merge_specs(seen: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """Merge the specs of several runs; sizes that differ become ``VARIES``."""
    merged = []
    for specs in zip(*seen, strict=True):
        sizes = (set(of_dimension) for of_dimension in zip(*(spec.shape for spec in specs), strict=True))
        shape = tuple(min(found) if len(found) == 1 else VARIES for found in sizes)
        order = specs[-1].order if len({spec.order for spec in specs}) == 1 else ()
        merged.append(replace(specs[-1], shape=shape, order=order))
    return tuple(merged)


def fill_sizes(
    specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]], where: Callable[[], str]
) -> tuple[TensorSpec, ...]:
    """Return ``specs`` with the sizes of ``shapes``, which have no batch size.

    Raises:
        PartitionError: If a size that does not vary differs from ``specs``; the text begins with the result of
            ``where``.
    """
    filled = []
    for spec, shape in zip(specs, shapes, strict=True):
        filled.append(_filled(spec, tuple(shape)))
        if len(shape) != len(spec.shape) or any(b not in (a, VARIES) for a, b in zip(shape, spec.shape, strict=True)):
            raise PartitionError(
                f"{where()} is {filled[-1]}, expected {spec}: in the samples at the start nothing but the sizes shown "
                "as ? changed; put samples of all lengths among the first ones, or pad to one length"
            )
    return tuple(filled)


@lru_cache(maxsize=4096)
def _filled(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return replace(spec, shape=shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Specs(NamedTuple):
    """The tensors of one edge, in training and in evaluation."""

    training: tuple[TensorSpec, ...]
    evaluation: tuple[TensorSpec, ...]

    @classmethod
    def always(cls, specs: Iterable[TensorSpec]) -> "Specs":
        """Return specs that are the same in training and evaluation."""
        return cls(*[tuple(specs)] * 2)

    @property
    def varies(self) -> bool:
        """Whether some sizes change from one micro-batch to another."""
        return any(spec.varies for mode in self for spec in mode)

    def for_segment(self, *, training: bool) -> tuple[TensorSpec, ...]:
        """Return the specs of a segment of training or of evaluation."""
        return self.training if training else self.evaluation

    def getting_gradients(self, gets: Iterable[bool] | None) -> "Specs":
        """Return the specs with a gradient only where ``gets`` is true."""
        if gets is None:
            return self
        pairs = zip(self.training, gets, strict=True)
        return self._replace(training=tuple(replace(spec, gets_gradient=get) for spec, get in pairs))

    def of_gradients(self) -> "Specs":
        """Return the specs of the gradients that come back."""
        return Specs(*(tuple(spec for spec in specs if spec.takes_gradient) for specs in self))
