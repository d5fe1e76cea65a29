"""Directed edges between processes. Only this file calls isend and irecv.

One process group per directed edge, never one per neighbour pair: on one communicator operations finish in the order of
issue, and with both directions on it this schedule deadlocks for every K >= 2 (tests/schedule/test_schedule.py shows
both). With one group per edge an early receive holds up nothing but later receives of its own edge, in all of torch
2.11 to 2.15; docs/dev/gpu.md explains why no batched exchange is needed. All groups are made in the same order on every
rank and connected before the first step, so that a first message never waits for a handshake in the middle of training.

In training no message over gloo has a time limit of its own. A peer that has ended closes its connections, and the
watchdog (monitor/watchdog.py) ends a job without progress. Unlike gloo and NCCL, the watchdog does not count the time
in which all processes were stopped.
"""

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError
from adl_dist.schedule.pipeline import RECEIVED_AHEAD
from adl_dist.transport.port_filter import blocking_new
from adl_dist.transport.spec import TensorSpec, fill_sizes
from adl_dist.transport.staging import Wait, arrival, send_from_gpu, to_device, to_host
from adl_dist.transport.wire import SpecsByMicroBatch, Wire

POSTED_AHEAD = RECEIVED_AHEAD  # receives over NCCL beyond the one awaited
SIZES = " sizes"  # ends the names of edges that carry headers
NO_LIMIT = datetime.timedelta(days=10)  # of one message over gloo; torch counts milliseconds in 32 bits
ABORT_SECONDS = 10.0  # limit for NCCL to give up a communicator
ON_CPU = ("target", "label", "go")  # small, and their receivers need them on the CPU
T = TypeVar("T")
Issue = Callable[..., dist.Work | None]
SEND: Issue = dist.isend
RECEIVE: Issue = dist.irecv
Works = list[tuple[Wait | None, Tensor]]  # None for an empty tensor; the buffers that they use


class Edge(NamedTuple):
    """A communicator from one stage to a stage in another process."""

    sender: int
    receiver: int
    ranks: tuple[int, int]  # of sender and receiver
    group: dist.ProcessGroup
    backend: str  # "gloo" or "nccl"


def connect_edges(
    triples: Iterable[tuple[str, int, int]],
    *,
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta,
) -> dict[tuple[str, int], Edge]:
    """Connect edges between processes; every rank calls it.

    Stage s is in rank s mod the number of ranks.

    Args:
        triples: (kind of messages, sending stage, receiving stage) of each edge, in the same order on every rank.
        backend: carries the tensors that stay on ``device``.
        device: the device of this rank.
        timeout: the limit of the first message of each edge, and of all messages over NCCL.

    Returns:
        Edges by (kind, sending stage), for example ``("act", k)`` to k + 1; only those with an end on this rank.
    """
    rank, num_ranks, edges = dist.get_rank(), dist.get_world_size(), {}
    for what, sender, to in triples:
        ranks = sender % num_ranks, to % num_ranks
        if ranks[0] == ranks[1]:
            continue
        edge_backend = "gloo" if what in ON_CPU or what.endswith(SIZES) else backend
        # NCCL asks strangers for a number that only its ranks know, and may connect again later.
        with blocking_new() if edge_backend == "gloo" else nullcontext():
            group = dist.new_group(
                list(ranks),
                backend=edge_backend,
                timeout=timeout,
                # Named, or NCCL takes LOCAL_RANK modulo the device count (torch 2.15).
                device_id=device if edge_backend == "nccl" else None,
            )
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            edge = edges[what, sender] = Edge(sender, to, ranks, group, edge_backend)
            probe = torch.zeros(1, device=device if edge_backend == "nccl" else "cpu")
            if rank == ranks[0]:
                dist.send(probe, ranks[1], group=edge.group)
            else:
                dist.recv(probe, ranks[0], group=edge.group)
    return edges


def abort(edges: Iterable[Edge]) -> None:
    """Abort NCCL's messages, which wait for a peer on the GPU.

    All edges are aborted at once, because to abort one frees its memory, and this waits for the kernels of all others.
    gloo finds out by itself that a peer is gone.
    """
    threads = [Thread(target=edge.group.abort, daemon=True) for edge in edges if edge.backend == "nccl"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


class Pending(NamedTuple):
    """One message under way."""

    micro_batch: int
    specs: tuple[TensorSpec, ...]
    works: Works


class End:
    """One end of an edge, with its messages under way.

    Args:
        edge: the communicator.
        wire: the form of its messages.
        headers: the gloo edge for headers, or None if messages have none.
        peer: the rank at the other end.
        trouble: the beginning of an error's text, with ``{}`` for the micro-batch.
    """

    def __init__(self, edge: Edge, wire: Wire, headers: Edge | None, peer: int, trouble: str) -> None:
        self.wire = wire
        self._edge, self._headers, self._peer, self._trouble = edge, headers, peer, trouble
        self._pending: deque[Pending] = deque()

    def _tag(self, micro_batch: int, place: int) -> int:
        """Return the tag of a tensor; the header's place is -1."""
        return micro_batch * (1 + len(self.wire.specs)) + 1 + place

    def _issue(self, issue: Issue, edge: Edge, micro_batch: int, tag: int, tensor: Tensor) -> Wait | None:
        """Start to send or receive one tensor; return the function that waits."""
        work = self._guard(micro_batch, lambda: issue(tensor, self._peer, group=edge.group, tag=tag))
        if work is None:
            return None
        return work.wait if edge.backend == "nccl" else partial(work.wait, NO_LIMIT)

    def _wait(self, micro_batch: int, works: Works) -> None:
        for wait, _ in works:
            if wait is not None:
                self._guard(micro_batch, wait)

    def _guard(self, micro_batch: int, call: Callable[[], T]) -> T:
        """Return the result of ``call``, which fails if the peer is gone."""
        try:
            return call()
        except torch.AcceleratorError:
            raise  # of this GPU: the peer is not to blame
        except RuntimeError as error:
            what = self._trouble.format(micro_batch)
            log = f"logs/rank{self._peer}.log"
            raise ChannelError(f"{what} is gone; its own log, {log}, says why") from error

    def _finish_oldest(self) -> Pending:
        """Wait for the oldest message under way, and return it."""
        message = self._pending.popleft()
        self._wait(message.micro_batch, message.works)
        return message


class ProcessSender(End):
    """The sender of the tensors of each micro-batch to one peer."""

    def __init__(
        self,
        edge: Edge,
        wire: Wire,
        *,
        max_pending: int,
        max_pending_in_evaluation: int,
        units: str = "",
        headers: Edge | None = None,
        answers: SpecsByMicroBatch | None = None,
    ) -> None:
        """Take the sending end of ``edge``.

        Args:
            edge: the communicator.
            wire: the form of the messages.
            max_pending: the most micro-batches sent and not yet taken by the peer, in training. With fewer than
                :func:`adl_dist.schedule.max_pending_of` returns, stages could wait for each other in a cycle.
            max_pending_in_evaluation: the limit in evaluation, where no gradient shows that a message was taken.
            units: the units of the sending stage, for errors.
            headers: the edge for the sizes of each message, or None if no sizes are sent.
            answers: receives, for each micro-batch of training, the specs of the gradients that come back.
        """
        self._where = f"stage {edge.sender}{units} -> stage {edge.receiver}: {wire.what} of micro-batch {{}}"
        trouble = f"{self._where} could not be sent: stage {edge.receiver}"
        super().__init__(edge, wire, headers, edge.ranks[1], trouble)
        self._max_pending, self._limits = max_pending, (max_pending_in_evaluation, max_pending)
        self._answers, self._is_answered = answers, True

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment with micro-batches of ``sizes`` samples."""
        self.wire.open(sizes, training=training)
        self._max_pending, self._is_answered = self._limits[training], training
        if self._answers is not None:
            self._answers.clear()

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Start to send; wait only if more than ``max_pending`` are under way."""
        specs, ready = self.wire.fit(micro_batch, tensors, partial(self._where.format, micro_batch))
        header = self._send_header(micro_batch, specs)
        if self._answers is not None and self._is_answered:
            self._answers[micro_batch] = tuple(spec for spec in specs if spec.takes_gradient)
        packed = enumerate(self.wire.pack(micro_batch, specs, ready))
        works = [self._begin(tensor, micro_batch, place) for place, tensor in packed if tensor.numel()]
        self._pending.append(Pending(micro_batch, specs, works + header))
        while len(self._pending) > self._max_pending:
            self._finish_oldest()

    def _send_header(self, micro_batch: int, specs: tuple[TensorSpec, ...]) -> Works:
        if self._headers is None:
            return []
        sizes = torch.tensor([size for spec in specs for size in spec.shape], dtype=torch.int64)
        return [(self._issue(SEND, self._headers, micro_batch, self._tag(micro_batch, -1), sizes), sizes)]

    def _begin(self, tensor: Tensor, micro_batch: int, place: int) -> tuple[Wait | None, Tensor]:
        """Start to send one tensor; return its wait and the memory to keep."""
        tag = self._tag(micro_batch, place)  # now: the next segment may have other specs
        send = partial(self._issue, SEND, self._edge, micro_batch, tag)
        if self._edge.backend != "gloo" or not tensor.is_cuda:
            return send(tensor), tensor
        host, copied = to_host(tensor)
        return send_from_gpu(tensor, host, copied, send), host

    def drain(self) -> None:
        """Wait until everything sent has left."""
        while self._pending:
            self._finish_oldest()


class ProcessReceiver(End):
    """The receiver of micro-batches from one peer, with receives ahead."""

    def __init__(
        self,
        edge: Edge,
        wire: Wire,
        *,
        device: torch.device,
        posted_ahead: int = POSTED_AHEAD,
        pinned: bool = False,
        headers: Edge | None = None,
        answers: SpecsByMicroBatch | None = None,
    ) -> None:
        """Take the receiving end of ``edge``.

        Args:
            edge: the communicator.
            wire: the form of the messages.
            device: where received tensors are needed.
            posted_ahead: receives posted beyond the one awaited.
            pinned: receive into pinned memory, because tensors move from the CPU to a GPU later.
            headers: the edge for the sizes of each message, or None if no sizes are sent.
            answers: the specs of the gradients to come, by micro-batch, filled by the sender of the activations.
        """
        waited = f"stage {edge.receiver} <- stage {edge.sender}: waited for the {wire.what} of micro-batch {{}}"
        super().__init__(edge, wire, headers, edge.ranks[0], f"{waited}, but the peer")
        self._device, self._answers = device, answers
        self._arrives_on = torch.device("cpu") if edge.backend == "gloo" else device
        self._through_host = self._arrives_on != device
        self._pinned = pinned or self._through_host
        # A wait over NCCL holds up only the GPU. The host waits for each act before it posts the next, or a stop would
        # find receives posted that no stage will send to (control/stop.py).
        self._holds_host = edge.backend == "nccl" and wire.what == "act" and headers is None
        self._arrived: torch.cuda.Event | None = None
        self._to_post: deque[int] = deque()
        self._posted_headers: deque[tuple[int, Works]] = deque()
        self._end, self._num_posted = 0, 1 + posted_ahead

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment of micro-batches of ``sizes``, which come in ``order``."""
        assert not self._pending, "the previous segment was not received to its end"
        self.wire.open(sizes, training=training)
        self._to_post, self._end = deque(order), len(sizes)

    def shorten(self, num_micro_batches: int) -> None:
        """Post no receive for micro-batches that will not be sent."""
        self._end = num_micro_batches

    def recv(self, micro_batch: int) -> Tensors:
        """Return the tensors of one micro-batch; post receives of the next ones."""
        if self._headers is None:
            self._post_ahead()
        else:
            self._post_after_header(self._headers)
        message = self._finish_oldest()
        assert message.micro_batch == micro_batch, f"expected micro-batch {micro_batch}, not {message.micro_batch}"
        buffers = [buffer for _, buffer in message.works]
        if self._through_host:
            buffers = [to_device(buffer, self._device) for buffer in buffers]
        return self.wire.unpack(micro_batch, message.specs, buffers)

    def _finish_oldest(self) -> Pending:
        message = super()._finish_oldest()
        if self._holds_host:
            self._arrived = arrival([wait for wait, _ in message.works if wait is not None], self._device)
        return message

    def _has_room(self, num_under_way: int) -> bool:
        """Return whether the next receive may be posted."""
        return num_under_way < self._num_posted and bool(self._to_post) and self._to_post[0] < self._end

    def _post_ahead(self) -> None:
        """Post receives; a varying gradient's once its activation is sent."""
        if self._arrived is not None:
            self._arrived.synchronize()
        while self._has_room(len(self._pending)):
            specs = self.wire.specs if self._answers is None else self._answers.pop(self._to_post[0], None)
            if specs is None:
                break
            self._post(self._to_post.popleft(), specs)

    def _post_after_header(self, headers: Edge) -> None:
        """Post headers, wait for the oldest, and post its tensors."""
        while self._has_room(len(self._posted_headers)):
            ahead = self._to_post.popleft()
            sizes = torch.empty(sum(len(spec.shape) for spec in self.wire.specs), dtype=torch.int64)
            wait = self._issue(RECEIVE, headers, ahead, self._tag(ahead, -1), sizes)
            self._posted_headers.append((ahead, [(wait, sizes)]))
        awaited, works = self._posted_headers.popleft()
        self._wait(awaited, works)
        sizes_left = iter(works[0][1].tolist())
        shapes = [[next(sizes_left) for _ in spec.shape] for spec in self.wire.specs]
        self._post(awaited, fill_sizes(self.wire.specs, shapes, partial(self._trouble.format, awaited)))

    def _post(self, micro_batch: int, specs: tuple[TensorSpec, ...]) -> None:
        works: Works = []
        made = self.wire.buffers(micro_batch, specs, self._arrives_on, pinned=self._pinned)
        for place, (buffer, view) in enumerate(made):
            tag = self._tag(micro_batch, place)
            wait = self._issue(RECEIVE, self._edge, micro_batch, tag, view) if view.numel() else None
            works.append((wait, buffer))
        self._pending.append(Pending(micro_batch, specs, works))
