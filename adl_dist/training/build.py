"""Builds one process's worker: settles the cut and what travels, then makes its stages and joins them to channels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError
from adl_dist.optim import build_lr_schedule, fast_forward
from adl_dist.schedule import Method, Pipeline, downstream_first, max_pending_of
from adl_dist.seeds import stream_seed
from adl_dist.stage import NORMALISES_SAMPLES, Stage, TrainSpec, build_head, check_outs, to_channels_last
from adl_dist.training import shape_inference
from adl_dist.training.input import DeviceLoader, common_sample
from adl_dist.training.partitioned_model import PartitionedModel
from adl_dist.transport import LocalChannel, ProcessReceiver, ProcessSender, Receiver, Sender, Specs, TensorSpec

GO = Specs.always([TensorSpec((), "uint8")])  # carries nothing but that it has come


def build_worker(
    spec: TrainSpec,
    partitioned: PartitionedModel,
    world: World,
    store: dist.Store,
    loaders: tuple[DeviceLoader | None, DeviceLoader | None],
    *,
    micro_batch_size: int,
    folder: Path | None = None,
    pick_next: Callable[[Sequence[int]], int] = downstream_first,
) -> LocalWorker:
    """Build the worker of this process; every rank calls it, and they settle through ``store`` what must be agreed on.

    Args:
        spec: how the model is trained.
        partitioned: the model.
        world: this process among the others.
        store: shared with the others, fresh for this job.
        loaders: micro-batches for training and for evaluation; None: there are none, or this is not stage 0's process.
        micro_batch_size: samples that a cut is measured with.
        folder: where measurements are kept; None: nowhere.
        pick_next: picks the next of several local stages.

    Raises:
        ConfigError, PartitionError, DataError: the job cannot be done.
        StageFailed, ChannelError: another rank found so, or does not answer.
    """
    pipeline, precision = spec.pipeline, spec.precision
    if isinstance(spec.loss_fn, nn.Module):
        spec.loss_fn.to(world.device, precision.dtype)
    sample = common_sample(*loaders)
    partitioned.finalize(
        store,
        spec,
        sample=sample,
        feed=loaders[0] or loaders[1],
        micro_batch_size=micro_batch_size,
        folder=folder,
    )
    for module in partitioned.modules.values():
        module.to(world.device)
        if precision.channels_last:
            to_channels_last(module)
    agreed = _agree(spec, partitioned, world, store, sample)
    num_outputs = shape_inference.num_outputs(store, pipeline.num_stages)
    stages = {
        k: build_stage(module, k, spec, agreed, num_classes=num_outputs, device=world.device)
        for k, module in partitioned.modules.items()
    }
    for loader in loaders:
        if loader is not None and num_outputs is not None:
            loader.expect_classes(spec.loss_fn, num_outputs)
    acts = {k: specs.travelling(precision.wire_dtype) for k, specs in agreed.acts.items()}
    if world.is_distributed:
        contexts = process_context(world, stages[world.rank], acts, agreed.target, pipeline)
    else:
        contexts = local_contexts(stages, acts, agreed.target, pipeline.method)
    return LocalWorker(world, pipeline, spec.seed, precision.dtype, contexts, *loaders, pick_next)


def _agree(
    spec: TrainSpec,
    partitioned: PartitionedModel,
    world: World,
    store: dist.Store,
    sample: tuple[Tensor, Tensor] | None,
) -> shape_inference.Agreed:
    """Settle with the other ranks that all do the same job, and the shapes of what travels."""
    method, precision = spec.pipeline.method, spec.precision
    shape_inference.check_consistent(store, world.rank, world.size, settings_of(spec, partitioned))
    agreed = shape_inference.infer_shapes(
        store,
        partitioned.modules,
        num_stages=spec.pipeline.num_stages,
        loss_fn=spec.loss_fn,
        sample=sample,
        device=world.device,
        within=precision.autocasting(world.device),
        check=partial(check_outs, method.head) if method.spec.local_losses else None,
    )
    check_targets(method, agreed.target)
    return agreed


def settings_of(spec: TrainSpec, partitioned: PartitionedModel) -> dict[str, object]:
    """Return the plain values that two ranks, or a run and its continuation, must have in common."""
    balance = partitioned.spec.balance
    return {
        **spec.settings,
        "balance": balance if isinstance(balance, str) else list(balance),
        "model": {name: list(shape) for name, shape in partitioned.signature.items()},
    }


def build_stage(
    module: nn.Module,
    k: int,
    spec: TrainSpec,
    agreed: shape_inference.Agreed,
    *,
    num_classes: int | None,
    device: torch.device,
) -> Stage:
    """Build the stage that trains ``module``.

    Args:
        module: part k of the model, on its device.
        k: its index.
        spec: how it is trained.
        agreed: the shapes of what travels.
        num_classes: the number of classes in the model's output, if that is [B, classes].
        device: where the module is.

    Raises:
        ConfigError: local losses, but no classes.
    """
    pipeline, method, head = spec.pipeline, spec.pipeline.method, None
    if method.spec.local_losses and pipeline.num_stages > 1 and num_classes is None:  # on every rank alike
        raise ConfigError("method=dgl needs a model that returns [B, classes], or there is nothing to learn locally")
    if method.spec.local_losses and k < pipeline.num_stages - 1:
        assert num_classes is not None
        seed = stream_seed(spec.seed, "head", k)
        head = build_head(method.head, agreed.acts[k + 1].training[0], num_classes=num_classes, seed=seed)
        head = head.to(device, spec.precision.dtype)
        if spec.precision.channels_last:
            to_channels_last(head)
    return Stage(module, k, spec, device=device, head=head, overwrites=agreed.overwrites[k])


def schedule_learning_rates(
    stages: Iterable[Stage],
    lr_schedule: Callable[..., LRScheduler],
    *,
    pipeline: Pipeline,
    updates_per_epoch: int,
    total_updates: int,
) -> None:
    """Give each stage with an optimizer the schedule that ``lr_schedule`` makes, where the method has it start."""
    for stage in stages:
        if stage.optimizer is not None:
            stage.lr_schedule = build_lr_schedule(
                lr_schedule, stage.optimizer, updates_per_epoch=updates_per_epoch, total_updates=total_updates
            )
            lead = pipeline.lr_lead(stage.index)
            stage.lr_updates = total_updates - lead
            fast_forward(stage.lr_schedule, min(lead, total_updates))


def check_sizes(pipeline: Pipeline, sizes: Iterable[int]) -> None:
    """Refuse micro-batches that a local loss cannot be made of.

    Raises:
        ConfigError: BatchNorm over the features of one single sample.
    """
    method = pipeline.method
    if method.spec.local_losses and pipeline.num_stages > 1 and method.head in NORMALISES_SAMPLES and 1 in sizes:
        raise ConfigError(
            f"a micro-batch of the training data holds a single sample, which BatchNorm in method.head={method.head} "
            "cannot normalise; choose another train.batch_size, or method.head=linear"
        )


def check_targets(method: Method, target: TensorSpec) -> None:
    """Refuse targets that a local loss cannot be made of.

    Raises:
        ConfigError: similarities of targets that are no classes.
    """
    if method.spec.local_losses and method.head == "predsim" and (target.is_floating_point or target.shape):
        raise ConfigError(
            f"method.head=predsim compares samples by their class, but the targets are {target}; expected one whole "
            "number per sample: choose another method.head"
        )


def local_contexts(
    stages: Mapping[int, Stage], acts: Mapping[int, Specs], target: TensorSpec, method: Method
) -> dict[int, StageContext]:
    """Build the contexts of all K stages in one process.

    Args:
        stages: all of them, by k.
        acts: what arrives at each stage.
        target: what the loss takes besides the output.
        method: decides what else travels.
    """
    last, targets = max(stages), Specs.always([target])
    contexts = {k: StageContext(stage, receivers={}, senders={}) for k, stage in stages.items()}

    def join(what: str, source: int, to: int, specs: Specs) -> None:
        channel = LocalChannel(specs, what=what, edge=f"stage {source} -> stage {to}")
        contexts[source].senders[what] = contexts[to].receivers[what] = channel  # type: ignore[index]

    for k in range(last):
        join("act", k, k + 1, acts[k + 1])
        join("grad", k + 1, k, acts[k + 1].of_gradients())
        if method.spec.forward_lock:
            join("go", k + 1, k, GO)
        if method.spec.local_losses:
            join("label", k, k + 1, targets)
    if last > 0:
        join("target", 0, last, targets)
    return contexts


def process_context(
    world: World, stage: Stage, acts: Mapping[int, Specs], target: TensorSpec, pipeline: Pipeline
) -> dict[int, StageContext]:
    """Build the context of the one stage of this process, connected to its neighbours'."""
    method, k, last, targets = pipeline.method, world.rank, pipeline.num_stages - 1, Specs.always([target])
    world.connect_more((["go"] if method.spec.forward_lock else []) + (["label"] if method.spec.local_losses else []))
    receivers: dict[str, Receiver] = {}
    senders: dict[str, Sender] = {}

    most, in_evaluation = max_pending_of(pipeline), pipeline.max_pending

    def send(what: str, specs: Specs) -> None:
        senders[what] = ProcessSender(
            world.edges[what, k],
            specs,
            what=what,
            max_pending=most[what, k],
            max_pending_in_evaluation=in_evaluation,
        )

    def receive(what: str, source: int, specs: Specs) -> None:
        # Labels travel to the next stage from the CPU; a stage that computes with one moves it.
        device = torch.device("cpu") if what in ("go", "label") else world.device
        receivers[what] = ProcessReceiver(world.edges[what, source], specs, what=what, device=device)

    if k < last:
        send("act", acts[k + 1])
        receive("grad", k + 1, acts[k + 1].of_gradients())
    if k > 0:
        receive("act", k - 1, acts[k])
        send("grad", acts[k].of_gradients())
    if k == 0 and last > 0:
        send("target", targets)
    if k == last and last > 0:
        receive("target", 0, targets)
    if method.spec.forward_lock:
        if k < last:
            receive("go", k + 1, GO)
        if k > 0:
            send("go", GO)
    if method.spec.local_losses:
        if k < last:
            send("label", targets)
        if k > 0:
            receive("label", k - 1, targets)
    return {k: StageContext(stage, receivers=receivers, senders=senders)}
