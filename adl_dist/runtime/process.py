"""What a process that trains sets for itself: its cores, and how its memory is kept."""

import ctypes
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
HEAP_STEP = 64 << 20  # bytes by which the heap grows


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for the next micro-batch; to the end of the process.

    By default glibc gives large blocks back at once, and the kernel has to zero every activation's pages anew, which
    is a sixth of the time of a small ResNet on a CPU. Nothing changes where the user has chosen (``MALLOC_*_``,
    ``GLIBC_TUNABLES=glibc.malloc...``) or where there is no glibc.
    """
    if sys.platform != "linux" or _has_chosen(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return
    mallopt(M_MMAP_MAX, 0)  # no block gets pages of its own
    mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
    mallopt(M_TOP_PAD, HEAP_STEP)


def _has_chosen(environment: Mapping[str, str]) -> bool:
    tunables = environment.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_here() -> list[int]:
    """Their numbers; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def own_cores(of_ranks: Sequence[Sequence[int]], local_rank: int) -> list[int] | None:
    """The share of one of the processes of a node.

    Args:
        of_ranks: cores that each process of the node may use, in the order of local ranks.
        local_rank: which of them.

    Returns:
        None: somebody else has given them their cores already, or there is not one for each.
    """
    cores, size = list(of_ranks[local_rank]), len(of_ranks)
    if any(list(others) != cores for others in of_ranks) or len(cores) < size:
        return None
    return cores[local_rank * len(cores) // size : (local_rank + 1) * len(cores) // size]


@contextmanager
def bound_to(cores: Collection[int] | None) -> Iterator[None]:
    """Compute on ``cores`` only, if any are named.

    Only this thread is bound, with those that it starts. Those that serve messages were started before and go wherever
    there is time.
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
