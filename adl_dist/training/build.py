"""Makes one process's worker out of a job: settles the cut and what travels, then builds and joins its stages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.world import World
from adl_dist.schedule import Method, in_turn
from adl_dist.stage import Guard, check_outs
from adl_dist.training import shape_inference, wiring
from adl_dist.training.input import Feed, common_sample
from adl_dist.training.partitioned_model import Placement
from adl_dist.training.precision import Numerics, to_channels_last

LossFn = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how, the same on every rank.

    Attributes:
        method: whose schedule is followed.
        num_stages: K.
        seed: of data order, augmentation and dropout.
        loss_fn: (output, target) to the mean loss over the samples.
        optimizer: makes the optimizer of one stage.
        numerics: how stages compute.
        guard: what is done to gradients before they are applied.
        channels_last: whether images are stored so.
        balance: as asked for.
        placement: the model, and where it is cut.
    """

    method: Method
    num_stages: int
    seed: int
    loss_fn: LossFn
    optimizer: OptimizerFactory
    numerics: Numerics
    guard: Guard
    channels_last: bool
    balance: str | list[Any]
    placement: Placement

    @property
    def settings(self) -> dict[str, Any]:
        """What two ranks, or a run and its continuation, must have in common."""
        return {
            "method": self.method.settings,
            "num_stages": self.num_stages,
            "balance": self.balance,
            "seed": self.seed,
            **self.numerics.settings,
            **self.guard.settings,
            "channels_last": self.channels_last,
            "model": {name: list(shape) for name, shape in self.placement.signature.items()},
        }


def assemble(
    job: Job,
    world: World,
    store: dist.Store,
    *,
    train_feed: Feed | None,
    val_feed: Feed | None,
    micro_batch_size: int,
    folder: Path | None = None,
    choose: Callable[[Sequence[int]], int] = in_turn,
) -> LocalWorker:
    """The worker of this process; every rank calls it, and they settle through ``store`` what they must agree on.

    Args:
        job: to be done.
        world: this process among the others.
        store: shared with the others, fresh for this job.
        train_feed: micro-batches for training; on stage 0's process only.
        val_feed: likewise for evaluation.
        micro_batch_size: samples that a cut is measured with.
        folder: where measurements are kept; None: nowhere.
        choose: which of several local stages goes on.

    Raises:
        ConfigError, PartitionError, DataError: the job cannot be done.
        StageFailed, ChannelError: another rank has found so, or does not answer.
    """
    method, numerics, num_stages = job.method, job.numerics, job.num_stages
    if isinstance(job.loss_fn, nn.Module):
        job.loss_fn.to(world.device, numerics.dtype)
    sample = common_sample(train_feed, val_feed)
    job.placement.settle(
        store,
        method=method,
        sample=sample,
        feed=train_feed or val_feed,
        micro_batch_size=micro_batch_size,
        loss_fn=job.loss_fn,
        optimizer=job.optimizer,
        device=world.device,
        numerics=numerics,
        channels_last=job.channels_last,
        folder=folder,
    )
    modules = job.placement.modules
    for module in modules.values():
        module.to(world.device)
        if job.channels_last:
            to_channels_last(module)
    shape_inference.check_same(store, world.rank, world.size, job.settings)
    agreed = shape_inference.agree(
        store,
        modules,
        num_stages=num_stages,
        loss_fn=job.loss_fn,
        sample=sample,
        device=world.device,
        within=numerics.autocasting(world.device),
        check=partial(check_outs, method.head) if method.row.local_losses else None,
    )
    wiring.check_targets(method, agreed.target)
    num_outputs = shape_inference.num_outputs(store, num_stages)
    stages = {
        k: wiring.build_stage(
            module,
            k,
            num_stages=num_stages,
            method=method,
            loss_fn=job.loss_fn,
            optimizer=job.optimizer,
            outs=agreed.acts[k + 1],
            overwrites=agreed.overwrites[k],
            num_classes=num_outputs,
            device=world.device,
            numerics=numerics,
            guard=job.guard,
            channels_last=job.channels_last,
            seed=job.seed,
        )
        for k, module in modules.items()
    }
    for feed in (train_feed, val_feed):
        if feed is not None and num_outputs is not None:
            feed.expect_classes(job.loss_fn, num_outputs)
    acts = {k: specs.travelling(numerics.wire_dtype) for k, specs in agreed.acts.items()}
    seats = (
        wiring.process_seat(world, stages[world.rank], acts, agreed.target, method=method, num_stages=num_stages)
        if world.is_distributed
        else wiring.local_seats(stages, acts, agreed.target, method=method)
    )
    return LocalWorker(world, method, num_stages, job.seed, numerics.dtype, seats, train_feed, val_feed, choose)
