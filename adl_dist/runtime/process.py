"""What a process that trains sets for itself: its cores, and how its memory is kept."""

import ctypes
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
HEAP_STEP = 64 << 20  # bytes by which the heap grows


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for the next micro-batch; to the end of the process.

    By default glibc gives large blocks back at once, and the kernel has to zero every activation's pages anew, which
    is a sixth of the time of a small ResNet on a CPU. Nothing changes where the user has chosen (``MALLOC_*_``,
    ``GLIBC_TUNABLES``) or where there is no glibc.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return
    mallopt(M_MMAP_MAX, 0)  # no block gets pages of its own
    mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
    mallopt(M_TOP_PAD, HEAP_STEP)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores(local_rank: int, local_size: int) -> set[int] | None:
    """The share of this process among those of its node; None if there is not a core for each."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < local_size:
        return None
    return set(cores[local_rank * len(cores) // local_size : (local_rank + 1) * len(cores) // local_size])


@contextmanager
def bound_to(cores: Collection[int] | None) -> Iterator[None]:
    """Compute on ``cores`` only, if any are named.

    Only this thread is bound, with those that it starts: those that serve messages go wherever there is time.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
