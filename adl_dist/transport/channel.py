"""The contract of one directed edge, and its in-process form; process.py has that between processes."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError
from adl_dist.transport.spec import Specs, fitted


class Sender(Protocol):
    """The upstream end for acts and targets, the downstream end for grads."""

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment whose micro-batches hold ``sizes`` samples, of training or of evaluation."""

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Hand over the tensors of one micro-batch; they must not be written to afterwards."""

    def drain(self) -> None:
        """Return when everything sent has left."""


class Receiver(Protocol):
    """The other end. Micro-batches arrive in the order in which they were sent."""

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment whose micro-batches hold ``sizes`` samples and arrive in ``order``."""

    def shorten(self, num_micro_batches: int) -> None:
        """Expect the first ``num_micro_batches`` of the segment alone."""

    def recv(self, micro_batch: int) -> Tensors:
        """Wait for the tensors of one micro-batch; the caller owns them."""


class LocalChannel:
    """Both ends within one process: a queue. Same contract, same values, same memory format."""

    def __init__(self, specs: Specs, *, what: str, edge: str) -> None:
        self._agreed, self._what, self._edge = specs, what, edge
        self._where = f"{edge}: {what} of micro-batch {{}}"
        self._specs = specs.training
        self._sizes: Sequence[int] = ()
        self._queue: deque[tuple[int, Tensors]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment; the queue has the order of sending."""
        self._sizes, self._specs = sizes, self._agreed.for_segment(training=training)

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Queue the tensors themselves."""
        self._queue.append((micro_batch, self._fitted(micro_batch, tensors)))

    def _fitted(self, micro_batch: int, tensors: Tensors) -> Tensors:
        """Return the tensors in the agreed format."""
        size, where = self._sizes[micro_batch], partial(self._where.format, micro_batch)
        return tuple([tensor for _, tensor in fitted(self._specs, tensors, size, where)])

    def recv(self, micro_batch: int) -> Tensors:
        """Take the oldest."""
        got, tensors = self._queue.popleft()
        if got != micro_batch:
            raise ChannelError(f"{self._edge}: expected the {self._what} of micro-batch {micro_batch}, got {got}")
        return tensors

    def shorten(self, num_micro_batches: int) -> None:
        """Nothing is expected before it is asked for."""

    def drain(self) -> None:
        """Nothing to wait for."""
