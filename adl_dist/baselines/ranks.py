"""The processes of a baseline, joined as in torch's own examples."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def joined(
    rank: int, size: int, *, device: torch.device, timeout_seconds: float, rendezvous: str = "env://"
) -> Iterator[None]:
    """Join the other ranks and leave them at the end; after an error without waiting for them.

    Args:
        rank: this process's rank.
        size: K; 1: there is nothing to join.
        device: this rank's device; NCCL connects GPUs if each rank has one of its own, gloo everything else.
        timeout_seconds: the longest that one operation may take.
        rendezvous: ``env://`` with MASTER_ADDR and MASTER_PORT, or ``file:///PATH``.
    """
    if size == 1:
        yield
        return
    has_gpu = device.type == "cuda" and torch.cuda.device_count() >= size
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if has_gpu else None,
    )
    yield
    dist.barrier(device_ids=[device.index] if has_gpu else None)
    dist.destroy_process_group()
