"""Between a GPU and pinned host memory, for gloo, which reads and writes host memory only.

Each direction has a copy stream of its own. The compute stream is not held up by a copy out, and a copy in does not
queue up behind what has been launched. The thread that trains waits for neither: a thread of its own waits until a
tensor has left the GPU, and then sends it. It has to be a thread, because a receive over gloo can only be waited for,
so that nothing else could be begun meanwhile; docs/dev/gpu.md has more.

Pinned buffers need no bookkeeping here: a copy that does not block records an event with torch's caching host
allocator, which does not give the memory of a freed buffer out again before that event (THCCachingHostAllocator.h;
pytorch#130785). Of device memory the allocator knows one stream only; ``record_stream`` names the others, and what is
copied out is kept until it has left.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor], dist.Work | None]  # begins to send what is in host memory


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is needed here."""

    def synchronize(self) -> None:
        """Wait until the GPU has come to it."""


@cache
def copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream for copies in one direction, the same for all edges of a process."""
    return torch.cuda.Stream(device)


@cache
def _outbox(device: torch.device) -> ThreadPoolExecutor:
    """Return the thread that sends what leaves ``device``, one after the other, as copies end in that order, too."""
    # A new thread has GPU 0 for its own, and would take memory there to wait for an event of another one.
    prepare = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    return ThreadPoolExecutor(1, thread_name_prefix="send from GPU", initializer=prepare)


class SendFromGpu:
    """A send that begins when its tensor has left the GPU; to be waited for like the ``Work`` of one."""

    def __init__(self, tensor: Tensor, host: Tensor, copied: Event, send: Send) -> None:
        """Let ``send`` have ``host`` as soon as that is ``copied`` from ``tensor``, which is kept until then."""
        self._begun = _outbox(tensor.device).submit(_send_later, tensor, host, copied, send)

    def wait(self) -> None:
        """Wait until the peer has it; raise what :attr:`dist.Work.wait` raises, or ``send``."""
        work = self._begun.result()
        assert work is not None, "this process is an end of the edge"
        work.wait()


def _send_later(_: Tensor, host: Tensor, copied: Event, send: Send) -> dist.Work | None:
    copied.synchronize()
    return send(host)


def arrival(works: Iterable[dist.Work], device: torch.device) -> torch.cuda.Event:
    """Return when what NCCL receives is there, whatever the compute stream still has to do before it."""
    stream, complete = copy_stream(device, "arrivals"), torch.cuda.Event(blocking=True)
    with torch.cuda.stream(stream):
        for work in works:
            work.wait()  # holds up this stream alone
        complete.record(stream)
    return complete


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Return a pinned copy of ``tensor``, which is on a GPU, and when it is complete; keep ``tensor`` until then."""
    compute, copies = torch.cuda.current_stream(tensor.device), copy_stream(tensor.device, "out")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copies.wait_stream(compute)  # what computes the tensor may only be launched by now
    with torch.cuda.stream(copies):
        host.copy_(tensor, non_blocking=True)
        copied = copies.record_event(torch.cuda.Event(blocking=True))  # who waits leaves its core to others
    return host, copied


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a GPU of ``host``, best pinned; complete for all later work of the compute stream."""
    compute, copies = torch.cuda.current_stream(device), copy_stream(device, "in")
    with torch.cuda.stream(copies):
        tensor = host.to(device, non_blocking=True)
    compute.wait_stream(copies)
    tensor.record_stream(compute)  # it is of the copy stream's memory, but freed when the compute stream is done
    return tensor
