"""Builds one process's worker: settles the cut and what travels, then makes its stages and joins them to channels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError
from adl_dist.optim import build_lr_schedule, fast_forward
from adl_dist.schedule import Pipeline, downstream_first, max_pending_of
from adl_dist.schedule.run_plan import Plan
from adl_dist.seeds import stream_seed
from adl_dist.stage import Stage, TrainSpec, in_dtype
from adl_dist.stage.heads import NORMALISES_SAMPLES, build_head
from adl_dist.training import samples as samples_of
from adl_dist.training.agreement import check_consistent
from adl_dist.training.findings import Agreed
from adl_dist.training.input import DeviceLoader
from adl_dist.training.partitioned_model import Measuring, PartitionedModel
from adl_dist.transport.channel import LocalChannel
from adl_dist.transport.process import ProcessReceiver, ProcessSender
from adl_dist.transport.spec import Specs, TensorSpec

GO = Specs.always([TensorSpec((), "uint8")])  # carries nothing but that it has come


def build_worker(
    spec: TrainSpec,
    partitioned: PartitionedModel,
    world: World,
    store: dist.Store,
    loaders: tuple[DeviceLoader | None, DeviceLoader | None],
    *,
    plan: Plan,
    folder: Path | None = None,
    pick_next: Callable[[Sequence[int]], int] = downstream_first,
) -> LocalWorker:
    """Build the worker of this process; every rank calls it, and they settle through ``store`` what must be agreed on.

    The process of stage 0 has ``loaders`` for training and for evaluation, or one of them; ``plan`` says
    what micro-batches they make. If the cut is measured, ``folder`` keeps the measurement.

    Raises:
        ConfigError, PartitionError, DataError: the job cannot be done.
        StageFailed, ChannelError: another rank found so, or does not answer.
    """
    device = world.device
    if isinstance(spec.loss_fn, nn.Module):
        in_dtype(spec.loss_fn, spec.precision.dtype, device)
    check_consistent(store, world.rank, world.size, settings_of(spec, partitioned), found=False)
    samples = samples_of.share(
        store, samples_of.take(*loaders, plan.first_epoch.sizes), rank=world.rank, size=world.size
    )
    feed = loaders[0] or loaders[1]
    measuring = Measuring(feed, plan.micro_batch_size, folder) if feed is not None else None
    spec, agreed, _ = partitioned.finalize(store, spec, samples, device=device, measuring=measuring)
    check_consistent(store, world.rank, world.size, agreed.plain(), found=True)
    precision = spec.precision
    modules = {k: precision.place(module, device) for k, module in partitioned.modules.items()}
    check_targets(spec.pipeline, agreed)
    stages = {k: build_stage(module, k, spec, agreed, device) for k, module in modules.items()}
    for loader in loaders:
        if loader is not None:
            loader.precision = precision
            if agreed.num_classes is not None:
                loader.expect_classes(spec.loss_fn, agreed.num_classes)
    acts = {k: specs.travelling(precision.wire_dtype) for k, specs in agreed.acts.items()}
    contexts = connect_stages(world, stages, acts, agreed.target, spec.pipeline)
    return LocalWorker(world, spec.pipeline, spec.seed, precision.dtype, contexts, *loaders, pick_next)


def settings_of(spec: TrainSpec, partitioned: PartitionedModel) -> dict[str, object]:
    """Return the plain values that two ranks, or a run and its continuation, must have in common."""
    balance = partitioned.spec.balance
    return {
        **spec.settings,
        "balance": balance if isinstance(balance, str) else list(balance),
        "model": {name: list(shape) for name, shape in partitioned.signature.items()},
    }


def check_sizes(pipeline: Pipeline, sizes: Iterable[int]) -> None:
    """Raise ConfigError for a local loss with BatchNorm over the features of one single sample."""
    head = pipeline.method.head
    if pipeline.spec.local_losses and pipeline.num_stages > 1 and head in NORMALISES_SAMPLES and 1 in sizes:
        raise ConfigError(
            f"a micro-batch of the training data holds a single sample, which BatchNorm in method.head={head} "
            "cannot normalise; choose another train.batch_size, or method.head=linear"
        )


def check_targets(pipeline: Pipeline, agreed: Agreed) -> None:
    """Raise ConfigError for a local loss without classes to learn or to compare; every rank finds it alike."""
    if not pipeline.spec.local_losses:
        return
    target = agreed.target
    if pipeline.method.head == "predsim" and (target.is_floating_point or target.shape):
        raise ConfigError(
            f"method.head=predsim compares samples by their class, but the targets are {target}; expected one whole "
            "number per sample: choose another method.head"
        )
    if pipeline.num_stages > 1 and agreed.num_classes is None:
        raise ConfigError("method=dgl needs a model that returns [B, classes], or there is nothing to learn locally")


def build_stage(module: nn.Module, k: int, spec: TrainSpec, agreed: Agreed, device: torch.device) -> Stage:
    """Build the stage that trains ``module``, part k of the model on ``device``."""
    method, head = spec.pipeline.method, None
    if method.spec.local_losses and k < spec.pipeline.num_stages - 1:
        assert agreed.num_classes is not None
        shape, seed = agreed.acts[k + 1].training[0].shape, stream_seed(spec.seed, "head", k)
        head = build_head(method.head, shape, num_classes=agreed.num_classes, seed=seed)
        spec.precision.place(head, device)
    return Stage(module, k, spec, device=device, head=head, traits=agreed.traits[k])


def edges_of(pipeline: Pipeline) -> list[tuple[str, int, int]]:
    """Return all edges: what travels, from which stage, to which."""
    last = pipeline.num_stages - 1
    edges = [("target", 0, last)] if last > 0 else []
    for k in range(last):
        edges += [("act", k, k + 1), ("grad", k + 1, k)]
        if pipeline.spec.forward_lock:
            edges.append(("go", k + 1, k))
        if pipeline.spec.local_losses:
            edges.append(("label", k, k + 1))
    return edges


def connect_stages(
    world: World, stages: Mapping[int, Stage], acts: Mapping[int, Specs], target: TensorSpec, pipeline: Pipeline
) -> dict[int, StageContext]:
    """Join the stages of this process to their neighbours, in this process or in others.

    ``acts`` are what arrives at each of them and at the next one, ``target`` what the loss takes besides the output.
    """
    edges = edges_of(pipeline)
    contexts = {k: StageContext(stage) for k, stage in stages.items()}
    if world.is_distributed:
        most = max_pending_of(pipeline)
        world.connect_more(sorted({what for what, _, _ in edges}))
    for what, source, to in edges:
        if source not in stages and to not in stages:
            continue
        if what == "act":
            specs = acts[to]
        elif what == "grad":
            specs = acts[source].of_gradients()
        else:
            specs = GO if what == "go" else Specs.always([target])
        if not world.is_distributed:
            channel = LocalChannel(specs, what=what, edge=f"stage {source} -> stage {to}")
            contexts[source].senders[what] = contexts[to].receivers[what] = channel
        elif source in stages:
            contexts[source].senders[what] = ProcessSender(
                world.edges[what, source],
                specs,
                what=what,
                max_pending=most[what, source],
                max_pending_in_evaluation=pipeline.max_pending,
            )
        else:
            # Labels travel to the next stage from the CPU; a stage that computes with one moves it.
            device = torch.device("cpu") if what in ("go", "label") else world.device
            contexts[to].receivers[what] = ProcessReceiver(world.edges[what, source], specs, what=what, device=device)
    return contexts


def schedule_learning_rates(
    worker: LocalWorker, lr_schedule: Callable[..., LRScheduler], plan: Plan, store: dist.Store
) -> None:
    """Give each stage with an optimizer the schedule that ``lr_schedule`` makes, where the method has it start."""
    if 0 in worker.contexts:  # only the process with the data knows how long an epoch is
        store.set("updates_per_epoch", str(plan.updates_per_epoch))
        store.set("total_updates", str(plan.total_updates))
    length = {name: int(store.get(name)) for name in ("updates_per_epoch", "total_updates")}
    for stage in worker.stages:
        if stage.optimizer is not None:
            lead = worker.pipeline.lr_lead(stage.index)
            stage.lr_schedule = build_lr_schedule(lr_schedule, stage.optimizer, **length)
            stage.lr_updates = length["total_updates"] - lead
            fast_forward(stage.lr_schedule, min(lead, length["total_updates"]))
