"""The training loop that everybody writes, on one device; the same on each of K, with DDP."""

import datetime
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.distributed.device import message_backend

Batches = Iterator[tuple[Tensor, Tensor]]
LossFn = Callable[[Any, Tensor], Tensor]

# Renamed in torch 2.15, which warns of the old name.
_SYNC = "forward_sync_buffers"
if _SYNC not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _SYNC = "broadcast_buffers"


@dataclass(kw_only=True)
class Training:
    """How long to train with what; ends each update and notes when."""

    device: torch.device
    num_updates: int
    micro_batches: int  # of one update
    loss_fn: LossFn  # (output, target) to the mean over the samples
    optimizer: Optimizer | None = None  # None: there are no parameters here
    lr_schedule: LRScheduler | None = None  # stepped once per update
    _ends: list[Any] = field(default_factory=list)

    def update(self) -> None:
        """Take one step with the gradients that have come together, and forget them."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        if self.device.type == "cuda":  # an event: a loop that waited for the GPU would be slower
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def ends(self) -> list[float]:
        """Return when each update ended, in seconds since the end of the first; wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [self._ends[0].elapsed_time(end) / 1000 for end in self._ends]
        return [end - self._ends[0] for end in self._ends]


def train_alone(model: nn.Module, batches: Batches, training: Training) -> None:
    """Train ``model`` on micro-batches (input [B, ...] on its device, target), accumulating their gradients."""
    model.train()
    for _ in range(training.num_updates):
        for _ in range(training.micro_batches):
            input_, target = next(batches)
            loss = training.loss_fn(model(input_), target.to(input_.device, non_blocking=True))
            (loss / training.micro_batches).backward()
        training.update()


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    """Return ``model``, one of K replicas, so that gradients are averaged while the backward still runs.

    Whatever equal weights do not need is omitted, so that DDP is as fast as it can be: running statistics of BatchNorm
    are not broadcast, and gradients lie in the buckets that are sent.
    """
    options: dict[str, Any] = {"device_ids": [device] if device.type == "cuda" else None, _SYNC: False}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


@contextmanager
def joined(
    rank: int, size: int, *, device: torch.device, timeout_seconds: float, rendezvous: str = "env://"
) -> Iterator[None]:
    """Join the other ranks, as in torch's own examples, and leave them; after an error without waiting for them.

    NCCL connects GPUs if each of the ``size`` ranks has one of its own, gloo everything else; one rank joins nothing.
    ``timeout_seconds`` limits one operation. ``rendezvous``: ``env://`` with MASTER_ADDR and MASTER_PORT, or
    ``file:///PATH``.
    """
    if size == 1:
        yield
        return
    store, *_ = next(dist.rendezvous(rendezvous, rank, size))
    backend = message_backend(device, rank, size, dist.PrefixStore("gpus", store))
    has_gpu = backend == "nccl"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if has_gpu else None,
    )
    yield
    dist.barrier(device_ids=[device.index] if has_gpu else None)
    dist.destroy_process_group()
