"""A plain training loop on one device, and on each of K devices with DDP."""

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
    """The settings and objects of a training; records when each update ends."""

    device: torch.device
    num_updates: int
    micro_batches: int  # of one update
    loss_fn: LossFn  # (output, target) to the mean over the samples
    optimizer: Optimizer | None = None  # None without parameters
    lr_schedule: LRScheduler | None = None  # stepped once per update
    after_step: Callable[[], None] | None = None  # like DiLoCo's outer step
    _ends: list[Any] = field(default_factory=list)

    def update(self) -> None:
        """Take one step with the accumulated gradients, and clear them."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        if self.after_step is not None:
            self.after_step()
        if self.device.type == "cuda":  # an event: a loop that waited for the GPU would be slower
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def ends(self) -> list[float]:
        """Return each update's end, in seconds since the end of the first update."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [self._ends[0].elapsed_time(end) / 1000 for end in self._ends]
        return [end - self._ends[0] for end in self._ends]


def train_alone(model: nn.Module, batches: Batches, training: Training) -> None:
    """Train ``model`` on micro-batches and accumulate their gradients."""
    model.train()
    for _ in range(training.num_updates):
        for _ in range(training.micro_batches):
            input_, target = next(batches)
            loss = training.loss_fn(model(input_), target.to(input_.device, non_blocking=True))
            (loss / training.micro_batches).backward()
        training.update()


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap one of K replicas in DDP, which averages gradients in the backward.

    Options make DDP as fast as it can be: running statistics of BatchNorm are not broadcast, and gradients are views of
    the buckets that are sent.
    """
    options: dict[str, Any] = {"device_ids": [device] if device.type == "cuda" else None, _SYNC: False}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def broadcast_number(value: float, device: torch.device) -> float:
    """Return the ``value`` of rank 0 on all ranks; this rank is on ``device``."""
    over_nccl = dist.get_backend() == "nccl"  # which only sends tensors on a GPU
    number = torch.tensor([value], dtype=torch.float64, device=device if over_nccl else None)
    dist.broadcast(number, src=0)
    return number.item()


@contextmanager
def joined(
    rank: int, size: int, *, device: torch.device, timeout_seconds: float, rendezvous: str = "env://"
) -> Iterator[None]:
    """Join the other ranks for the block, and wait for them unless it fails.

    The backend is NCCL if each of the ``size`` ranks has its own GPU, otherwise gloo. A single rank joins nothing.
    ``timeout_seconds`` limits one operation. ``rendezvous`` is ``env://`` with MASTER_ADDR and MASTER_PORT, or
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
