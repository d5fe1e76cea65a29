"""The interface of an edge's ends, and the edge within one process."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError
from adl_dist.transport.wire import Wire


class Sender(Protocol):
    """The upstream end for acts and targets, the downstream end for grads."""

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment with micro-batches of ``sizes`` samples."""

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Send the tensors of one micro-batch, which must not change afterwards."""

    def drain(self) -> None:
        """Wait until everything sent has left."""


class Receiver(Protocol):
    """The other end. Micro-batches arrive in the order of sending."""

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment of micro-batches of ``sizes``, which come in ``order``."""

    def shorten(self, num_micro_batches: int) -> None:
        """Expect only the first ``num_micro_batches`` of the segment."""

    def recv(self, micro_batch: int) -> Tensors:
        """Wait for the tensors of one micro-batch; the caller owns them."""


class LocalChannel:
    """Both ends within one process: a queue with the same values."""

    def __init__(self, wire: Wire, *, edge: str) -> None:
        """Create the queue of ``edge``, the name for messages."""
        self.wire, self._edge = wire, edge
        self._where = f"{edge}: {wire.what} of micro-batch {{}}"
        self._queue: deque[tuple[int, Tensors]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment; ``order`` is ignored, because the queue has its own."""
        self.wire.open(sizes, training=training)

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Queue the tensors as they would arrive in another process."""
        specs, ready = self.wire.fit(micro_batch, tensors, partial(self._where.format, micro_batch))
        self._queue.append((micro_batch, self.wire.pass_on(micro_batch, specs, ready)))

    def recv(self, micro_batch: int) -> Tensors:
        """Return the oldest message; ChannelError if it is another micro-batch's."""
        got, tensors = self._queue.popleft()
        if got != micro_batch:
            raise ChannelError(f"{self._edge}: expected the {self.wire.what} of micro-batch {micro_batch}, got {got}")
        return tensors

    def shorten(self, num_micro_batches: int) -> None:
        """Do nothing: nothing is posted ahead."""

    def drain(self) -> None:
        """Do nothing: nothing leaves the process."""
