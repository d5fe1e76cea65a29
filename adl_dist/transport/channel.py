"""The edge within one process."""

from collections import deque
from collections.abc import Sequence
from functools import partial

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError
from adl_dist.transport.wire import Wire


class LocalChannel:
    """Both ends within one process: a queue with the same values.

    The ends between processes, in process.py, have the same methods.
    """

    def __init__(self, wire: Wire, *, edge: str) -> None:
        """Create the queue of ``edge``, the name for messages."""
        self.wire, self._edge = wire, edge
        self._where = f"{edge}: {wire.what} of micro-batch {{}}"
        self._queue: deque[tuple[int, Tensors]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment with micro-batches of ``sizes`` samples.

        A receiver is told the ``order`` in which they come, which the queue has anyway.
        """
        self.wire.open(sizes, training=training)

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Send the tensors of one micro-batch, which must not change afterwards."""
        specs, ready = self.wire.fit(micro_batch, tensors, partial(self._where.format, micro_batch))
        self._queue.append((micro_batch, self.wire.pass_on(micro_batch, specs, ready)))

    def recv(self, micro_batch: int) -> Tensors:
        """Return the tensors of one micro-batch, which the caller then owns.

        Raises:
            ChannelError: If another micro-batch has been sent before.
        """
        got, tensors = self._queue.popleft()
        if got != micro_batch:
            raise ChannelError(f"{self._edge}: expected the {self.wire.what} of micro-batch {micro_batch}, got {got}")
        return tensors

    def shorten(self, num_micro_batches: int) -> None:
        """Expect only the first ``num_micro_batches`` of the segment."""

    def drain(self) -> None:
        """Wait until everything sent has left."""
