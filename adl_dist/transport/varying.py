"""Edges over which lengths change from one micro-batch to another: sizes are told with each message.

A message of activations or targets has a header, the sizes of its tensors. It goes by the host: by the edge itself
where that is gloo, else by a gloo edge next to it. A gradient has the sizes of what it is the gradient of, which its
receiver has sent, so it has no header. Everything else is as on edges of one size, which know nothing of this file.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.errors import PartitionError
from adl_dist.transport.channel import LocalChannel
from adl_dist.transport.process import (
    POSTED_AHEAD,
    RECEIVE,
    SEND,
    Edge,
    End,
    Issue,
    ProcessReceiver,
    ProcessSender,
    Works,
)
from adl_dist.transport.spec import VARIES, Specs, TensorSpec

AsSent = dict[int, tuple[TensorSpec, ...]]  # by micro-batch, the sizes of what was sent


def merged(seen: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors that were ``seen`` several times, with those sizes open that were not the same."""
    return tuple(map(_merged, zip(*seen, strict=True)))


def _merged(specs: Sequence[TensorSpec]) -> TensorSpec:
    sizes = (set(of_dimension) for of_dimension in zip(*(spec.shape for spec in specs), strict=True))
    shape = tuple(min(of) if len(of) == 1 else VARIES for of in sizes)
    return replace(specs[-1], shape=shape, channels_last=all(spec.channels_last for spec in specs))


def sized(specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int]], where: Callable[[], str]) -> list[TensorSpec]:
    """Return ``specs`` of the sizes in ``shapes``, which are without the batch dimension.

    Raises:
        PartitionError: a size differs that is not open; the text begins with what ``where`` returns.
    """
    if len(specs) != len(shapes):
        return [*specs]  # an error, which is raised where tensors are fitted
    found = []
    for spec, shape in zip(specs, shapes, strict=True):
        fits = len(shape) == len(spec.shape) and all(b in (a, VARIES) for a, b in zip(shape, spec.shape, strict=True))
        if not fits:
            raise PartitionError(
                f"{where()} is {_sized(spec, tuple(shape))}, expected {spec}: in the samples at the start nothing but "
                "the sizes shown as ? changed; put samples of all lengths among the first ones, or pad to one length"
            )
        found.append(_sized(spec, tuple(shape)))
    return found


@lru_cache(maxsize=4096)
def _sized(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return replace(spec, shape=shape)


def _shapes(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    if len(specs) != len(tensors):
        return []
    return [tuple(tensor.shape[int(spec.batched) :]) for spec, tensor in zip(specs, tensors, strict=True)]


class VaryingChannel(LocalChannel):
    """Both ends within one process."""

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, order, training=training)
        self._open = self._specs

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Queue the tensors."""
        self._specs = tuple(sized(self._open, _shapes(self._open, tensors), partial(self._where.format, micro_batch)))
        super().send(micro_batch, tensors)


class _Tagged(End):
    """An end of an edge whose messages have a place for a header before their tensors."""

    def _tag(self, micro_batch: int, place: int) -> int:
        return micro_batch * (1 + len(self._specs)) + 1 + place

    def _header(self, issue: Issue, header: Tensor, micro_batch: int, edge: Edge) -> tuple[dist.Work | None, Tensor]:
        return self._issue(issue, edge, micro_batch, self._tag(micro_batch, -1), header), header


class VaryingSender(_Tagged, ProcessSender):
    """Sends tensors with a header, or gradients without one."""

    _headers: Edge | None = None  # the edge of headers; None: none is sent
    _as_sent: AsSent | None = None  # notes the sizes of what leaves, for the gradients that come back

    def telling(self, headers: Edge, as_sent: AsSent | None) -> "VaryingSender":
        """Send headers by the edge ``headers``, and note in ``as_sent`` what gradients will come back; return self."""
        self._headers, self._as_sent = headers, as_sent
        return self

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, training=training)
        self._open, self._is_answered = self._specs, training
        if self._as_sent is not None:
            self._as_sent.clear()

    def _begun(self, micro_batch: int, tensors: Tensors) -> Works:
        """Start to send a header, if there is one, and the tensors of one micro-batch; return what is waited for."""
        self._specs = tuple(sized(self._open, _shapes(self._open, tensors), partial(self._where.format, micro_batch)))
        header: Works = []
        if self._headers is not None:
            sizes = torch.tensor([size for spec in self._specs for size in spec.shape], dtype=torch.int64)
            header = [self._header(SEND, sizes, micro_batch, self._headers)]
        if self._as_sent is not None and self._is_answered:
            self._as_sent[micro_batch] = tuple(spec for spec in self._specs if spec.takes_gradient)
        return [*super()._begun(micro_batch, tensors), *header]


class VaryingReceiver(_Tagged, ProcessReceiver):
    """Receives tensors of the sizes that a header tells, for which it waits before it posts their receives."""

    def __init__(
        self,
        edge: Edge,
        specs: Specs,
        *,
        what: str,
        device: torch.device,
        headers: Edge,
        posted_ahead: int = POSTED_AHEAD,
        pinned: bool = False,
    ) -> None:
        super().__init__(edge, specs, what=what, device=device, posted_ahead=posted_ahead, pinned=pinned)
        self._headers = headers
        self._awaited: deque[tuple[int, tuple[dist.Work | None, Tensor]]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, order, training=training)
        self._open = self._specs

    def recv(self, micro_batch: int) -> Tensors:
        """Wait for one micro-batch, with the receives of the next headers posted."""
        while len(self._awaited) < self._num_posted and self._to_post and self._to_post[0] < self._end:
            ahead = self._to_post.popleft()
            sizes = torch.empty(sum(len(spec.shape) for spec in self._open), dtype=torch.int64)
            self._awaited.append((ahead, self._header(RECEIVE, sizes, ahead, self._headers)))
        awaited, (work, header) = self._awaited.popleft()
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._lost(awaited) from error
        told = iter(header.tolist())
        shapes = [[next(told) for _ in spec.shape] for spec in self._open]
        self._specs = tuple(sized(self._open, shapes, partial(self._trouble.format, awaited)))
        self._post(awaited)
        return self._taken(micro_batch)


class GradientReceiver(_Tagged, ProcessReceiver):
    """Receives gradients of the sizes of what was sent."""

    def __init__(
        self,
        edge: Edge,
        specs: Specs,
        *,
        what: str,
        device: torch.device,
        as_sent: AsSent,
        posted_ahead: int = POSTED_AHEAD,
    ) -> None:
        super().__init__(edge, specs, what=what, device=device, posted_ahead=posted_ahead)
        self._as_sent = as_sent
        self._posted: deque[tuple[TensorSpec, ...]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, order, training=training)
        self._posted.clear()

    def recv(self, micro_batch: int) -> Tensors:
        """Wait for one micro-batch, with the receives of those posted whose activations have been sent."""
        while len(self._pending) < self._num_posted and self._to_post and self._to_post[0] < self._end:
            if (specs := self._as_sent.pop(self._to_post[0], None)) is None:
                break
            self._specs = specs
            self._posted.append(specs)
            self._post(self._to_post.popleft())
        self._specs = self._posted.popleft()
        return self._taken(micro_batch)
