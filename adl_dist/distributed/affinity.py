"""The cores and the C library's memory of a training process."""

import ctypes
import functools
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# <malloc.h>, <sys/mman.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
MADV_HUGEPAGE = 14
HEAP_STEP = 64 << 20  # growth of the heap, in bytes
RESERVED = 0.25  # share of the machine's memory: only addresses, a page is allocated at its first use


@functools.cache  # once per process
def tune_malloc() -> None:
    """Keep freed memory in huge pages for the next micro-batch.

    By default glibc returns large blocks at once, and the kernel has to find and zero the pages of every activation
    again, 4 KiB at a time: a sixth of the time of a small ResNet on a CPU. The user's own settings (``MALLOC_*_``,
    ``GLIBC_TUNABLES=glibc.malloc...``) win. Without glibc this does nothing.
    """
    has_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or has_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):  # musl
        return
    libc.mallopt(M_MMAP_MAX, 0)  # all blocks are in the heap
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
    libc.mallopt(M_TOP_PAD, HEAP_STEP)
    # Enlarge the heap once, by addresses, and ask for huge pages in it.
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":  # addresses count as memory there
        return
    libc.malloc.restype = ctypes.c_void_p
    reserved = libc.malloc(ctypes.c_size_t(int(RESERVED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))))
    libc.free(ctypes.c_void_p(reserved))  # not trimmed, so it stays in the heap
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cores_here()) or os.cpu_count() or 1


def default_threads(num_processes: int) -> int:
    """Return OMP_NUM_THREADS or, if not set, each process's share of cores."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it to 1 for ranks that have none
        with suppress(OSError):
            chosen = chosen if b"OMP_NUM_THREADS=" in Path(f"/proc/{os.getppid()}/environ").read_bytes() else ""
    return int(chosen) if chosen.isdigit() and int(chosen) else max(1, num_cores() // num_processes)


def cores_here() -> list[int]:
    """Return the cores that this process may use, or [] if unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def own_cores(of_ranks: Sequence[Sequence[int]], local_rank: int) -> list[int] | None:
    """Return the cores for the process ``local_rank`` of a node.

    Args:
        of_ranks: the cores that each process of the node may use.
        local_rank: the process.

    Returns:
        Its share of the cores, or None if the launcher has bound the processes or there are too few cores.
    """
    cores, size = list(of_ranks[local_rank]), len(of_ranks)
    if any(list(others) != cores for others in of_ranks) or len(cores) < size:
        return None
    return cores[local_rank * len(cores) // size : (local_rank + 1) * len(cores) // size]


@contextmanager
def bound_to(cores: Collection[int] | None) -> Iterator[None]:
    """Bind this thread and its new threads to ``cores``, if given.

    The threads that serve messages were started before and stay free.
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
