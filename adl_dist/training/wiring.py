"""Builds stages as a method wants them, and joins them and their channels into seats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError
from adl_dist.optim import build_lr_schedule, fast_forward
from adl_dist.schedule import Method, Pipeline, max_pending_of
from adl_dist.seeds import stream_seed
from adl_dist.stage import NORMALISES_SAMPLES, GradientPolicy, Stage, build_head
from adl_dist.training.precision import Precision, to_channels_last
from adl_dist.transport import LocalChannel, ProcessReceiver, ProcessSender, Receiver, Sender, Specs, TensorSpec

GO = Specs.always([TensorSpec((), "uint8")])  # carries nothing but that it has come


def build_stage(
    module: nn.Module,
    k: int,
    *,
    pipeline: Pipeline,
    loss_fn: Callable[[Any, Tensor], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    outs: Specs,
    overwrites: tuple[Sequence[bool], Sequence[bool]],
    num_classes: int | None,
    device: torch.device,
    precision: Precision,
    guard: GradientPolicy,
    channels_last: bool,
    seed: int,
) -> Stage:
    """The stage that trains ``module`` as ``pipeline`` has it.

    Args:
        module: part k of the model, on its device.
        k: its index.
        pipeline: says what is special about it: weight policy, shrinking, local loss, learning rate.
        loss_fn: of the model; a local loss uses it on the output of its head.
        optimizer: makes the optimizer of one stage.
        outs: what goes downstream.
        overwrites: in training and in evaluation, for each act that arrives whether the module writes to it.
        num_classes: of the model's output, if it is [B, classes].
        device: of the stage.
        precision: how it computes.
        guard: what it does to gradients before it applies them.
        channels_last: whether it stores images so.
        seed: of the run.

    Raises:
        ConfigError: local losses, but no classes.
    """
    method, is_last = pipeline.method, k == pipeline.num_stages - 1
    head = None
    if method.spec.local_losses and pipeline.num_stages > 1 and num_classes is None:  # on every rank alike
        raise ConfigError("method=dgl needs a model that returns [B, classes], or there is nothing to learn locally")
    if method.spec.local_losses and not is_last:
        assert num_classes is not None
        head = build_head(method.head, outs.training[0], num_classes=num_classes, seed=stream_seed(seed, "head", k))
        head = head.to(device, precision.dtype)
        if channels_last:
            to_channels_last(head)
    assert method.weights is not None
    return Stage(
        module,
        index=k,
        is_last=is_last,
        loss_fn=loss_fn,
        optimizer=optimizer,
        weights=method.weights,
        gradient_shrink=method.gradient_shrink,
        lr_factor=pipeline.lr_factor(k),
        head=head,
        learns_locally=method.spec.local_losses,
        overwrites=overwrites,
        within=precision.autocasting(device),
        compiled=precision.compile,
        guard=guard,
        seed=seed,
    )


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
    stages: Mapping[int, Stage], acts: Mapping[int, Specs], target: TensorSpec, *, method: Method
) -> dict[int, StageContext]:
    """Seats of all K stages in one process.

    Args:
        stages: all of them, by k.
        acts: what arrives at each stage.
        target: what the loss takes beside the output.
        method: says what else travels.
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
    world: World, stage: Stage, acts: Mapping[int, Specs], target: TensorSpec, *, pipeline: Pipeline
) -> dict[int, StageContext]:
    """The seat of the one stage of this process, connected to its neighbours'."""
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
        # Labels go on to the next stage from the CPU; whoever computes with one moves it.
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
