"""Data parallelism: each process trains the whole model on its share of the batch."""

import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adl_dist.baselines.loop import Batches, LossFn, Updates, train_alone

# Renamed in torch 2.15, which warns of the old name.
_SYNC = "forward_sync_buffers"
if _SYNC not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _SYNC = "broadcast_buffers"


def train_replica(
    model: nn.Module, batches: Batches, *, device: torch.device, num_updates: int, loss_fn: LossFn, updates: Updates
) -> None:
    """Train one of K replicas, whose gradients are averaged while the backward still runs.

    Whatever the same weights do not need is omitted, so that DDP is as fast as it can be: running statistics of
    BatchNorm are not broadcast, and gradients lie in the buckets that are sent.

    Args:
        model: the whole one, on ``device``, the same on every rank.
        batches: this rank's share of each batch, as (input, target).
        device: of this rank.
        num_updates: how long.
        loss_fn: (output, target) to the mean over the samples.
        updates: what ends an update; its optimizer has the parameters of ``model``.
    """
    replica = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{_SYNC: False},  # type: ignore[arg-type]
    )
    train_alone(replica, batches, num_updates=num_updates, micro_batches=1, loss_fn=loss_fn, updates=updates)
