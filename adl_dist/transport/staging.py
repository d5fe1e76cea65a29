"""Between a GPU and pinned host memory, for gloo, which reads and writes host memory only.

Each direction has a copy stream of its own. The compute stream is not held up by a copy out, a copy in does not queue
up behind what has been launched, and the host waits for one copy, never for the device.

Pinned buffers need no bookkeeping here: a copy that does not block records an event with torch's caching host
allocator, which does not give the memory of a freed buffer out again before that event (THCCachingHostAllocator.h;
pytorch#130785). Of device memory the allocator knows one stream only; ``record_stream`` names the others.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream for copies in one direction, the same for all edges of a process."""
    return torch.cuda.Stream(device)


def to_host(tensor: Tensor) -> Tensor:
    """Return a pinned copy of ``tensor``, which is on a GPU; complete when this returns."""
    compute, copies = torch.cuda.current_stream(tensor.device), copy_stream(tensor.device, "out")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copies.wait_stream(compute)  # what computes the tensor may only be launched by now
    with torch.cuda.stream(copies):
        host.copy_(tensor, non_blocking=True)
        copied = copies.record_event()
    tensor.record_stream(copies)
    # The next operations of the compute stream may run meanwhile: this is the only thing waited for.
    copied.synchronize()
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a GPU of ``host``, best pinned; complete for all later work of the compute stream."""
    compute, copies = torch.cuda.current_stream(device), copy_stream(device, "in")
    with torch.cuda.stream(copies):
        tensor = host.to(device, non_blocking=True)
    compute.wait_stream(copies)
    tensor.record_stream(compute)  # it is of the copy stream's memory, but freed when the compute stream is done
    return tensor
