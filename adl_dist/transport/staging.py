"""Copies between a GPU and pinned host memory, which gloo can send.

Each direction has a copy stream. A copy out does not delay the compute stream, and a copy in does not queue behind
launched work. The training thread waits for neither: a second thread waits until a tensor has left the GPU, and then
sends it. This must be a thread, because a receive over gloo can only be waited for; docs/dev/gpu.md has more.

Pinned buffers need no bookkeeping here: a non-blocking copy records an event with torch's caching host allocator, which
does not reuse the memory of a freed buffer before that event (THCCachingHostAllocator.h; pytorch#130785). The allocator
of device memory knows only one stream; ``record_stream`` names the others, and a tensor is kept until its copy is done.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch
from torch import Tensor

Wait = Callable[[], object]  # waits for a message
Send = Callable[[Tensor], Wait | None]  # begins to send a tensor in host memory


@cache
def copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the one stream of this process for copies in a direction."""
    return torch.cuda.Stream(device)


@cache
def _outbox(device: torch.device) -> ThreadPoolExecutor:
    """Return the thread that sends the tensors of ``device`` in order."""
    # The default device of a new thread is GPU 0, where it would take memory to wait for another GPU's event.
    prepare = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    return ThreadPoolExecutor(1, thread_name_prefix="send from GPU", initializer=prepare)


def send_from_gpu(tensor: Tensor, host: Tensor, copied: torch.cuda.Event, send: Send) -> Wait:
    """Send ``host`` once it is ``copied``, and keep ``tensor`` until then.

    The function returned waits until the peer has the tensor, or raises the error of the send.
    """
    begun = _outbox(tensor.device).submit(_send_later, tensor, host, copied, send)

    def wait() -> None:
        wait_for_peer = begun.result()
        assert wait_for_peer is not None, "this process is an end of the edge"
        wait_for_peer()

    return wait


def _send_later(_: Tensor, host: Tensor, copied: torch.cuda.Event, send: Send) -> Wait | None:
    copied.synchronize()
    return send(host)


def arrival(waits: Iterable[Wait], device: torch.device) -> torch.cuda.Event:
    """Return an event for the arrival of NCCL's receives."""
    stream, complete = copy_stream(device, "arrivals"), torch.cuda.Event(blocking=True)
    with torch.cuda.stream(stream):
        for wait in waits:
            wait()  # holds up only this stream
        complete.record(stream)
    return complete


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Return a pinned copy of ``tensor`` and the event of its completion."""
    compute, copies = torch.cuda.current_stream(tensor.device), copy_stream(tensor.device, "out")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copies.wait_stream(compute)  # the tensor may not have been computed yet
    with torch.cuda.stream(copies):
        host.copy_(tensor, non_blocking=True)
        copied = copies.record_event(torch.cuda.Event(blocking=True))  # a waiting thread leaves its core to others
    return host, copied


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy ``host`` to a GPU, before all later work of the compute stream."""
    compute, copies = torch.cuda.current_stream(device), copy_stream(device, "in")
    with torch.cuda.stream(copies):
        tensor = host.to(device, non_blocking=True)
    compute.wait_stream(copies)
    tensor.record_stream(compute)  # it belongs to the copy stream, but is freed when the compute stream is done
    return tensor
