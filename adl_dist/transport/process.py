"""Directed edges between processes. The only file that calls isend and irecv.

One process group per directed edge, never one per neighbour pair: on one communicator operations finish in
the order of issue, and with both directions on it this schedule deadlocks for every K >= 2
(tests/schedule/test_schedule.py shows both). With one group per edge an early receive holds up nothing but later
receives of its own edge, in all of torch 2.11 to 2.15; docs/dev/gpu.md says why no batched exchange is needed. All
groups are made in the same order on every rank and connected before the first step, so that a first message never
waits for a handshake in the middle of training.
"""

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.batch import Tensors
from adl_dist.errors import ChannelError
from adl_dist.schedule.actions import LINKS, Message, receiver
from adl_dist.schedule.pipeline import RECEIVED_AHEAD
from adl_dist.transport.port_filter import blocking_new
from adl_dist.transport.spec import Specs, fitted
from adl_dist.transport.staging import SendFromGpu, arrival, to_device, to_host

POSTED_AHEAD = RECEIVED_AHEAD  # receives over NCCL beyond the one awaited; tests/schedule/test_launch_order.py
SIZES = " sizes"  # ends the names of edges by which the sizes of messages go, see varying.py
ABORT_SECONDS = 10.0  # within which NCCL gives up a communicator
ON_CPU = ("target", "label", "go")  # small, and their receivers want them on the CPU
Issue = Callable[..., dist.Work | None]
SEND: Issue = dist.isend
RECEIVE: Issue = dist.irecv
# A Work, kept with the buffer that it uses; None: an empty tensor.
Works = list[tuple[dist.Work | SendFromGpu | None, Tensor]]


class Edge(NamedTuple):
    """A communicator of its own from one stage to another, in two processes."""

    sender: int
    receiver: int
    ranks: tuple[int, int]  # theirs
    group: dist.ProcessGroup
    backend: str  # "gloo" or "nccl"


def connect_edges(
    num_stages: int,
    links: Iterable[str],
    more: Iterable[Message] = (),
    *,
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta,
) -> dict[tuple[str, int], Edge]:
    """Make and connect all edges between processes for some kinds of ``LINKS``, and ``more``. Every rank calls it.

    Stage s is in rank s mod the number of ranks, which is stage s itself where there is a rank for each.

    ``backend`` carries the tensors that stay on ``device``, this rank's; ``timeout`` is the limit of one message.

    Returns:
        Edges by (what, sending stage), for example ``("act", k)`` to k + 1; only those this rank is an end of.
    """
    rank, num_ranks, edges = dist.get_rank(), dist.get_world_size(), {}
    pairs = [
        (what, sender, receiver(op, sender, num_stages=num_stages))
        for op, link in LINKS.items()
        for what in (link.what, f"{link.what}{SIZES}")
        if what in links
        for sender in ([0] if link.hop is None else range(num_stages))
    ] + list(more)
    for what, sender, to in pairs:
        ranks = sender % num_ranks, to % num_ranks
        if not 0 <= to < num_stages or ranks[0] == ranks[1]:
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
    """Give up what is under way over NCCL: kernels that wait on the GPU for a peer that will not send.

    All edges at once: to give up one frees its memory, which waits for the kernels of all others on the GPU. gloo finds
    out by itself that a peer is gone.
    """
    threads = [Thread(target=edge.group.abort, daemon=True) for edge in edges if edge.backend == "nccl"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)


class End:
    """One end of an edge, with the messages that are under way."""

    def __init__(self, edge: Edge, specs: Specs, peer: int, trouble: str) -> None:
        self._edge, self._agreed, self._peer, self._trouble = edge, specs, peer, trouble
        self._specs = specs.training
        self._sizes: Sequence[int] = ()
        self._pending: deque[tuple[int, Works]] = deque()

    def _begin(self, issue: Issue, wire: Tensor, micro_batch: int, place: int) -> dist.Work | None:
        """Start to send or receive the tensor at ``place`` of a micro-batch."""
        return self._issue(issue, self._edge, micro_batch, self._tag(micro_batch, place), wire)

    def _tag(self, micro_batch: int, place: int) -> int:
        return micro_batch * len(self._specs) + place

    def _issue(self, issue: Issue, edge: Edge, micro_batch: int, tag: int, wire: Tensor) -> dist.Work | None:
        try:
            return issue(wire, self._peer, group=edge.group, tag=tag)
        except torch.AcceleratorError:
            raise  # of this GPU: the peer is not to blame
        except RuntimeError as error:
            raise self._lost(micro_batch) from error

    def _finish_oldest(self) -> tuple[int, list[Tensor]]:
        """Wait for the message begun first; return its micro-batch and tensors."""
        micro_batch, works = self._pending.popleft()
        try:
            for work, _ in works:
                if work is not None:
                    work.wait()
        except torch.AcceleratorError:
            raise  # of this GPU: the peer is not to blame
        except RuntimeError as error:
            raise self._lost(micro_batch) from error
        return micro_batch, [buffer for _, buffer in works]

    def _lost(self, micro_batch: int) -> ChannelError:
        what = self._trouble.format(micro_batch)
        return ChannelError(f"{what} is gone or silent; its own log, logs/rank{self._peer}.log, says why")


class ProcessSender(End):
    """Sends the tensors of each micro-batch to one peer."""

    def __init__(
        self, edge: Edge, specs: Specs, *, what: str, max_pending: int, max_pending_in_evaluation: int, units: str = ""
    ) -> None:
        """Take the sending end of ``edge``; ``units``: those of the stage that sends, as errors show them.

        In training a send waits while ``max_pending`` micro-batches are not known to be taken by the peer. With fewer
        than :func:`adl_dist.schedule.work.max_pending_of` says, that could close a cycle of stages that wait for each
        other. In evaluation no gradient shows what was taken, and the limit is ``max_pending_in_evaluation``.
        """
        self._where = f"stage {edge.sender}{units} -> stage {edge.receiver}: {what} of micro-batch {{}}"
        super().__init__(edge, specs, edge.ranks[1], f"{self._where} could not be sent: stage {edge.receiver}")
        self._max_pending, self._limits = max_pending, (max_pending_in_evaluation, max_pending)

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        self._sizes, self._specs = sizes, self._agreed.for_segment(training=training)
        self._max_pending = self._limits[training]

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Start to send; return at once unless ``max_pending`` are under way."""
        self._pending.append((micro_batch, self._begun(micro_batch, tensors)))
        while len(self._pending) > self._max_pending:
            self._finish_oldest()

    def _begun(self, micro_batch: int, tensors: Tensors) -> Works:
        """Start to send the tensors of one micro-batch; return what is waited for."""
        size, where = self._sizes[micro_batch], partial(self._where.format, micro_batch)
        works: Works = []
        for place, (spec, tensor) in enumerate(fitted(self._specs, tensors, size, where)):
            wire = spec.as_wire(tensor)
            if not spec.is_empty:
                works.append(self._begin_send(wire, micro_batch, place))
        return works

    def _begin_send(self, wire: Tensor, micro_batch: int, place: int) -> tuple[dist.Work | SendFromGpu | None, Tensor]:
        """Start to send one tensor; return what is waited for, and the memory that is kept until then."""
        if self._edge.backend != "gloo" or not wire.is_cuda:
            return self._begin(SEND, wire, micro_batch, place), wire
        host, copied = to_host(wire)
        tag = self._tag(micro_batch, place)  # now: the next segment may have other specs
        return SendFromGpu(wire, host, copied, partial(self._issue, SEND, self._edge, micro_batch, tag)), host

    def drain(self) -> None:
        """Return when everything sent has left."""
        while self._pending:
            self._finish_oldest()


class ProcessReceiver(End):
    """Receives the tensors of each micro-batch from one peer, posting receives ahead."""

    def __init__(
        self,
        edge: Edge,
        specs: Specs,
        *,
        what: str,
        device: torch.device,
        posted_ahead: int = POSTED_AHEAD,
        pinned: bool = False,
    ) -> None:
        """Take the receiving end of ``edge``.

        ``posted_ahead``: receives that are posted beyond the one awaited. ``pinned``: what arrives on the CPU is moved
        to a GPU later on, and is in memory from which that waits for nothing.
        """
        waited = f"stage {edge.receiver} <- stage {edge.sender}: waited for the {what} of micro-batch {{}}"
        super().__init__(edge, specs, edge.ranks[0], f"{waited}, but the peer")
        self._device = device
        self._arrives_on = torch.device("cpu") if edge.backend == "gloo" else device
        self._through_host = self._arrives_on != device
        self._pinned = pinned or self._through_host
        # A wait over NCCL holds up the GPU alone. The host waits for each act before it posts the next, or a stop would
        # find receives posted that no stage will send to (control/stop.py; tests/schedule/test_launch_order.py).
        self._holds_host = edge.backend == "nccl" and what == "act"
        self._arrived: torch.cuda.Event | None = None
        self._to_post: deque[int] = deque()
        self._end, self._num_posted = 0, 1 + posted_ahead

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Begin a segment."""
        assert not self._pending, "the segment before was not received to its end"
        self._sizes, self._specs = sizes, self._agreed.for_segment(training=training)
        self._to_post, self._end = deque(order), len(sizes)

    def shorten(self, num_micro_batches: int) -> None:
        """Post no receive for what will not be sent."""
        self._end = num_micro_batches

    def recv(self, micro_batch: int) -> Tensors:
        """Wait for one micro-batch, with the receives of the next ones posted."""
        if self._arrived is not None:
            self._arrived.synchronize()
        while len(self._pending) < self._num_posted and self._to_post and self._to_post[0] < self._end:
            self._post(self._to_post.popleft())
        return self._taken(micro_batch)

    def _finish_oldest(self) -> tuple[int, list[Tensor]]:
        works = [work for work, _ in self._pending[0][1] if isinstance(work, dist.Work)]
        finished = super()._finish_oldest()
        if self._holds_host:
            self._arrived = arrival(works, self._device)
        return finished

    def _taken(self, micro_batch: int) -> Tensors:
        """Return the tensors of the message posted first, which is that of ``micro_batch``."""
        got, arrived = self._finish_oldest()
        assert got == micro_batch, f"the schedule asks for micro-batch {micro_batch}, {got} comes next"
        if self._through_host:
            arrived = [to_device(buffer, self._device) for buffer in arrived]
        return tuple(arrived)

    def _post(self, micro_batch: int) -> None:
        works: Works = []
        for place, spec in enumerate(self._specs):
            buffer = spec.empty(self._sizes[micro_batch], self._arrives_on, pinned=self._pinned)
            work = None if spec.is_empty else self._begin(RECEIVE, spec.as_wire(buffer), micro_batch, place)
            works.append((work, buffer))
        self._pending.append((micro_batch, works))
