"""The processes of a baseline, joined as torch's own examples do it."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def joined(rank: int, size: int, *, device: torch.device, rendezvous: str, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks, and leave them at the end; after an error without waiting for anybody.

    Args:
        rank: of this process.
        size: K.
        device: of this rank; NCCL connects GPUs if each rank has one of its own, gloo all else.
        rendezvous: ``file:///PATH``, or ``env://`` with MASTER_ADDR and MASTER_PORT.
        timeout_seconds: of one operation.
    """
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= size
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if own_gpu else None,
    )
    yield
    dist.barrier(device_ids=[device.index] if own_gpu else None)
    dist.destroy_process_group()
