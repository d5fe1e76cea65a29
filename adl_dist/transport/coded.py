"""Edges whose messages are coded in training, each into one buffer of bytes. All else is as without a codec.

Evaluation is never coded: what validation measures is the model, as it is exported and evaluated elsewhere.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from adl_dist.batch import Tensors
from adl_dist.transport.channel import LocalChannel
from adl_dist.transport.coding import Coder, layout
from adl_dist.transport.process import RECEIVE, ProcessReceiver, ProcessSender, Works
from adl_dist.transport.spec import fitted
from adl_dist.transport.staging import to_device
from adl_dist.transport.varying import GradientReceiver, VaryingChannel, VaryingReceiver, VaryingSender


class CodedChannel(LocalChannel):
    """Both ends within one process: what arrives is what would arrive in another one."""

    coder: Coder  # set right after it is made, as of all classes here

    def open(self, sizes: Sequence[int], order: Sequence[int] = (), *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, order, training=training)
        self._is_coded = training
        self.coder.begin()

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Queue what becomes of the tensors on the way."""
        if not self._is_coded:
            super().send(micro_batch, tensors)
            return
        ready = self._fitted(micro_batch, tensors)
        buffer = self.coder.encode(self._specs, ready, micro_batch)
        self._queue.append((micro_batch, self.coder.decode(self._specs, self._sizes[micro_batch], buffer)))


class CodedVaryingChannel(VaryingChannel, CodedChannel):
    """The same where sizes change."""


class CodedSender(ProcessSender):
    """Codes the tensors of each micro-batch and sends them in one message."""

    coder: Coder

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, training=training)
        self._is_coded = training
        self.coder.begin()

    def _begun(self, micro_batch: int, tensors: Tensors) -> Works:
        """Start to send one micro-batch; return what is waited for."""
        if not self._is_coded:
            return super()._begun(micro_batch, tensors)
        where = partial(self._where.format, micro_batch)
        ready = [tensor for _, tensor in fitted(self._specs, tensors, self._sizes[micro_batch], where)]
        wire = self.coder.encode(self._specs, ready, micro_batch)
        return [self._begin_send(wire, micro_batch, 0)] if len(wire) else []


class CodedVaryingSender(VaryingSender, CodedSender):
    """The same where sizes change; the header goes before the buffer."""


class CodedReceiver(ProcessReceiver):
    """Receives one message for each micro-batch, and decodes it when it is taken."""

    coder: Coder

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        super().open(sizes, order, training=training)
        self._is_coded = training

    def _taken(self, micro_batch: int) -> Tensors:
        """Return the tensors of the message posted first, which is that of ``micro_batch``."""
        if not self._is_coded:
            return super()._taken(micro_batch)
        got, (buffer,) = self._finish_oldest()
        assert got == micro_batch, f"the schedule asks for micro-batch {micro_batch}, {got} comes next"
        if self._through_host:
            buffer = to_device(buffer, self._device)
        return self.coder.decode(self._specs, self._sizes[micro_batch], buffer)

    def _post(self, micro_batch: int) -> None:
        if not self._is_coded:
            super()._post(micro_batch)
            return
        num_bytes = layout(self.coder.codec, tuple(self._specs), self._sizes[micro_batch])[1]
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._arrives_on, pin_memory=self._pinned)
        work = self._begin(RECEIVE, buffer, micro_batch, 0) if num_bytes else None
        self._pending.append((micro_batch, [(work, buffer)]))


class CodedVaryingReceiver(VaryingReceiver, CodedReceiver):
    """The same where sizes change, told by a header."""


class CodedGradientReceiver(GradientReceiver, CodedReceiver):
    """The same for gradients of what was sent in several sizes."""


# The class that codes, in the place of the one that does not.
CODED: dict[type, Any] = {
    LocalChannel: CodedChannel,
    VaryingChannel: CodedVaryingChannel,
    ProcessSender: CodedSender,
    VaryingSender: CodedVaryingSender,
    ProcessReceiver: CodedReceiver,
    VaryingReceiver: CodedVaryingReceiver,
    GradientReceiver: CodedGradientReceiver,
}
