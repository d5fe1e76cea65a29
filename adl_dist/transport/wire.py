"""The form of the messages of one edge, and the edge within one process.

Sizes that change are sent in a header before the tensors. A gradient has no header: it has the sizes of its activation,
which its receiver has sent. With a codec a message is one buffer of bytes. Evaluation is never coded, so that
validation measures the model as it is exported and evaluated elsewhere.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError, PartitionError
from adl_dist.transport.coding import Coder, layout
from adl_dist.transport.spec import SAME_EACH_TIME, Specs, TensorSpec, fill_sizes

SpecsByMicroBatch = dict[int, tuple[TensorSpec, ...]]


class Wire:
    """The form of one edge's messages, as its ends in one process use it.

    Attributes:
        what: the kind of message, for example "act".
        agreed: its tensors in training and in evaluation.
        specs: the tensors of one message in the present segment.
        varies: whether some of their sizes change from one micro-batch to another.
        coder: codes the messages of training; None without a codec.
        coding: the coder of the present segment; None if its messages are not coded.
    """

    def __init__(
        self, specs: Specs, what: str, codec: str = "none", seed_of: Callable[[int], int] | None = None
    ) -> None:
        """Create the form of messages; ``seed_of`` seeds their rounding."""
        self.what, self.agreed, self.varies = what, specs, specs.varies
        self.coder = None if codec == "none" else Coder(codec, seed_of)
        self.open((), training=True)

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment with micro-batches of ``sizes`` samples."""
        self._sizes, self.specs = sizes, self.agreed.for_segment(training=training)
        self.coding = self.coder if training else None
        if self.coder is not None:
            self.coder.begin()

    def fit(
        self, micro_batch: int, tensors: Tensors, where: Callable[[], str]
    ) -> tuple[tuple[TensorSpec, ...], Tensors]:
        """Return (complete specs of one message, its tensors converted to them).

        Raises:
            PartitionError: If the tensors differ from the agreed ones; the text begins with the result of ``where``.
        """
        specs, size = self.specs, self._sizes[micro_batch]
        if len(tensors) != len(specs):
            found = f"{where()} are {len(tensors)} tensors, expected {len(specs)}"
            raise PartitionError(f"{found}, as in the trial at the start; {SAME_EACH_TIME}")
        if self.varies:
            shapes = [tuple(tensor.shape[spec.batched :]) for spec, tensor in zip(specs, tensors, strict=True)]
            specs = fill_sizes(specs, shapes, where)
        return specs, tuple([spec.fit(tensor, size, where) for spec, tensor in zip(specs, tensors, strict=True)])

    def pack(self, micro_batch: int, specs: tuple[TensorSpec, ...], tensors: Tensors) -> list[Tensor]:
        """Return the contiguous tensors to send for one message."""
        if self.coding is not None:
            return [self.coding.encode(specs, tensors, micro_batch)]
        return [spec.as_wire(tensor) for spec, tensor in zip(specs, tensors, strict=True)]

    def buffers(
        self, micro_batch: int, specs: tuple[TensorSpec, ...], device: torch.device, *, pinned: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Return (buffer, contiguous view) for each tensor to receive."""
        size = self._sizes[micro_batch]
        if self.coding is not None:
            num_bytes = layout(self.coding.codec, specs, size)[1]
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            return [(buffer, buffer)]
        made = [spec.empty(size, device, pinned=pinned) for spec in specs]
        return [(buffer, spec.as_wire(buffer)) for spec, buffer in zip(specs, made, strict=True)]

    def unpack(self, micro_batch: int, specs: tuple[TensorSpec, ...], buffers: Sequence[Tensor]) -> Tensors:
        """Return the tensors of one message from its received buffers."""
        if self.coding is not None:
            return self.coding.decode(specs, self._sizes[micro_batch], buffers[0])
        return tuple(buffers)


class LocalChannel:
    """Both ends of an edge within one process, as a queue.

    The ends between processes, in process.py, have the same methods, and deliver the same values.
    """

    def __init__(self, wire: Wire, *, edge: str) -> None:
        """Create the queue; ``edge`` names it in errors."""
        self.wire, self._edge = wire, edge
        self._where = f"{edge}: {wire.what} of micro-batch {{}}"
        self._queue: deque[tuple[int, Tensors]] = deque()

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment with micro-batches of ``sizes`` samples.

        A receiver gets the ``order`` in which they come, but a queue has it anyway.
        """
        self.wire.open(sizes, training=training)

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Send the tensors of one micro-batch, which must not change afterwards."""
        specs, ready = self.wire.fit(micro_batch, tensors, partial(self._where.format, micro_batch))
        if self.wire.coding is not None:
            ready = self.wire.unpack(micro_batch, specs, self.wire.pack(micro_batch, specs, ready))
        self._queue.append((micro_batch, ready))

    def recv(self, micro_batch: int) -> Tensors:
        """Return the tensors of one micro-batch, which the caller then owns.

        Raises:
            ChannelError: If a different micro-batch is the oldest in the queue.
        """
        got, tensors = self._queue.popleft()
        if got != micro_batch:
            raise ChannelError(f"{self._edge}: expected the {self.wire.what} of micro-batch {micro_batch}, got {got}")
        return tensors

    def shorten(self, num_micro_batches: int) -> None:
        """Do nothing, because the queue posts no receives ahead."""

    def drain(self) -> None:
        """Do nothing, because a message leaves as soon as it is sent."""
