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
from adl_dist.schedule import Pipeline, downstream_first
from adl_dist.stage import GradientPolicy, check_outs
from adl_dist.training import shape_inference, wiring
from adl_dist.training.input import DeviceLoader, common_sample
from adl_dist.training.partitioned_model import PartitionedModel
from adl_dist.training.precision import Precision, to_channels_last

LossFn = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how, the same on every rank.

    Attributes:
        pipeline: the method and K.
        seed: of data order, augmentation and dropout.
        loss_fn: (output, target) to the mean loss over the samples.
        optimizer: makes the optimizer of one stage.
        precision: how stages compute.
        guard: what is done to gradients before they are applied.
        channels_last: whether images are stored so.
        balance: as asked for.
        partitioned: the model, and where it is cut.
    """

    pipeline: Pipeline
    seed: int
    loss_fn: LossFn
    optimizer: OptimizerFactory
    precision: Precision
    guard: GradientPolicy
    channels_last: bool
    balance: str | list[Any]
    partitioned: PartitionedModel

    @property
    def settings(self) -> dict[str, Any]:
        """What two ranks, or a run and its continuation, must have in common."""
        return {
            "method": self.pipeline.method.settings,
            "num_stages": self.pipeline.num_stages,
            "balance": self.balance,
            "seed": self.seed,
            **self.precision.settings,
            **self.guard.settings,
            "channels_last": self.channels_last,
            "model": {name: list(shape) for name, shape in self.partitioned.signature.items()},
        }


def assemble(
    job: Job,
    world: World,
    store: dist.Store,
    *,
    train_loader: DeviceLoader | None,
    val_loader: DeviceLoader | None,
    micro_batch_size: int,
    folder: Path | None = None,
    pick_next: Callable[[Sequence[int]], int] = downstream_first,
) -> LocalWorker:
    """The worker of this process; every rank calls it, and they settle through ``store`` what they must agree on.

    Args:
        job: to be done.
        world: this process among the others.
        store: shared with the others, fresh for this job.
        train_loader: micro-batches for training; on stage 0's process only.
        val_loader: likewise for evaluation.
        micro_batch_size: samples that a cut is measured with.
        folder: where measurements are kept; None: nowhere.
        pick_next: which of several local stages goes on.

    Raises:
        ConfigError, PartitionError, DataError: the job cannot be done.
        StageFailed, ChannelError: another rank has found so, or does not answer.
    """
    pipeline, method, precision = job.pipeline, job.pipeline.method, job.precision
    if isinstance(job.loss_fn, nn.Module):
        job.loss_fn.to(world.device, precision.dtype)
    sample = common_sample(train_loader, val_loader)
    job.partitioned.settle(
        store,
        pipeline=pipeline,
        sample=sample,
        feed=train_loader or val_loader,
        micro_batch_size=micro_batch_size,
        loss_fn=job.loss_fn,
        optimizer=job.optimizer,
        device=world.device,
        precision=precision,
        channels_last=job.channels_last,
        folder=folder,
    )
    modules = job.partitioned.modules
    for module in modules.values():
        module.to(world.device)
        if job.channels_last:
            to_channels_last(module)
    shape_inference.check_consistent(store, world.rank, world.size, job.settings)
    agreed = shape_inference.infer_shapes(
        store,
        modules,
        num_stages=pipeline.num_stages,
        loss_fn=job.loss_fn,
        sample=sample,
        device=world.device,
        within=precision.autocasting(world.device),
        check=partial(check_outs, method.head) if method.spec.local_losses else None,
    )
    wiring.check_targets(method, agreed.target)
    num_outputs = shape_inference.num_outputs(store, pipeline.num_stages)
    stages = {
        k: wiring.build_stage(
            module,
            k,
            pipeline=pipeline,
            loss_fn=job.loss_fn,
            optimizer=job.optimizer,
            outs=agreed.acts[k + 1],
            overwrites=agreed.overwrites[k],
            num_classes=num_outputs,
            device=world.device,
            precision=precision,
            guard=job.guard,
            channels_last=job.channels_last,
            seed=job.seed,
        )
        for k, module in modules.items()
    }
    for feed in (train_loader, val_loader):
        if feed is not None and num_outputs is not None:
            feed.expect_classes(job.loss_fn, num_outputs)
    acts = {k: specs.travelling(precision.wire_dtype) for k, specs in agreed.acts.items()}
    contexts = (
        wiring.process_context(world, stages[world.rank], acts, agreed.target, pipeline=pipeline)
        if world.is_distributed
        else wiring.local_contexts(stages, acts, agreed.target, method=method)
    )
    return LocalWorker(world, pipeline, job.seed, precision.dtype, contexts, train_loader, val_loader, pick_next)
