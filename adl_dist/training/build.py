"""Builds one process's worker: settles the cut and what travels, then makes its stages and joins them to channels."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.batch import Several, layout_of, tensors_of
from adl_dist.checkpoint.identity import class_name, described, described_optimizer, merged
from adl_dist.checkpoint.state import FreshStage
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError
from adl_dist.optim import build_lr_schedule, fast_forward, try_schedule
from adl_dist.optimizers import mark_roles
from adl_dist.optimizers.rules import RuledOptimizer
from adl_dist.report.progress import TOKENS
from adl_dist.report.warning import warn
from adl_dist.schedule import Pipeline, downstream_first
from adl_dist.schedule.run_plan import Plan
from adl_dist.seeds import stream_seed
from adl_dist.stage import LossFn, OptimizerFactory, Stage, TrainSpec, in_dtype
from adl_dist.stage.heads import build_gradient_network, build_head, normalises_samples
from adl_dist.stage.loss import LossTerms, ReturnsSumError, SumCountLoss, TreeTargetLoss, class_loss, loss_terms
from adl_dist.training.agreement import LENGTH, MADE, check_consistent, exchange, read
from adl_dist.training.edges import COUNTS, connect_stages
from adl_dist.training.input import DeviceLoader, Loaders
from adl_dist.training.links import links_between
from adl_dist.training.partitioned_model import Measuring, PartitionedModel, Settled
from adl_dist.training.trial import samples as samples_of
from adl_dist.training.trial.findings import Agreed
from adl_dist.training.trial.samples import Samples
from adl_dist.training.warm_up import check_without_warm_up, needs_warm_up, warm_up
from adl_dist.training.warm_updates import warm_up_updates

Settings = dict[str, Any]


def build_worker(
    spec: TrainSpec,
    partitioned: PartitionedModel,
    world: World,
    store: dist.Store,
    loaders: Loaders,
    *,
    plan: Plan,
    folder: Path | None = None,
    given: Settings,
    pick_next: Callable[[Sequence[int]], int] = downstream_first,
) -> tuple[LocalWorker, Settings]:
    """Build the worker of this process; every rank calls it, and they settle through ``store`` what must be agreed on.

    The process of stage 0 has ``loaders`` for training and for evaluation, or one of them, and the ``plan`` for that
    data. If the cut is measured, ``folder`` keeps the measurement; what the stages of a run without one begin with is
    not remembered, since nothing will be saved. ``given``: plain values that all ranks must have been given.

    Returns:
        The worker, and the settings in the optimizers and learning rate schedules of all stages; the same on each rank.

    Raises:
        ConfigError, PartitionError, DataError: the job cannot be done.
        StageFailed, ChannelError: another rank found so, or does not answer.
    """
    if spec.precision.compile:
        check_compiler(world.device)
    if world.size > 1 and plan.epochs:
        given = {**given, "optimizer": sample_optimizer(spec.optimizer)}
    loss_fn = spec.loss_fn  # the user's own
    spec, samples, agreed = settled(spec, partitioned, world, store, loaders, plan, folder, given)
    terms = loss_terms(spec.loss_fn, samples.one[1], spec.loss_reduction)
    check_targets(spec.pipeline, agreed)
    stages = placed_stages(spec, partitioned, agreed, world.device)
    made, scheduled = schedule_learning_rates(stages, spec, plan, store) if plan.epochs else ([], {})
    # The factories are the user's own: if one fails, no rank begins to wait for that stage.
    all_made = [one for by_rank in exchange(store, MADE, world.rank, world.size, made) for one in by_rank]
    for loader in loaders:
        if loader is not None:
            loader.precision = spec.precision
            loader.expect(spec, terms, num_outputs=agreed.num_outputs)
    targets = [*agreed.targets] if terms is None else [*agreed.targets, COUNTS]
    contexts = connect_stages(world, stages, agreed.acts, targets, spec.pipeline, spec.precision.codecs)
    if 0 in contexts:
        contexts[0].num_inputs = len(tensors_of(samples.one[0]))
    rehearse(contexts, spec, world, loaders, samples, agreed)
    fresh = {}
    if folder is not None:
        fresh = {k: FreshStage.of(stage, scheduled.get(k, ()), loss_fn) for k, stage in stages.items()}
    worker = LocalWorker(
        world,
        spec.pipeline,
        spec.precision.dtype,
        contexts,
        *loaders,
        terms,
        pick_next,
        is_plain=[layout_of(batch) for batch in samples.one] == [None, None],
        unit=unit_of(samples, spec.loss_fn, terms),
        fresh=fresh,
    )
    return worker, settings_made(spec, all_made)


def settled(
    spec: TrainSpec,
    partitioned: PartitionedModel,
    world: World,
    store: dist.Store,
    loaders: Loaders,
    plan: Plan,
    folder: Path | None,
    given: Settings,
) -> tuple[TrainSpec, Samples, Agreed]:
    """Settle with the other ranks what the loss takes, where the model is cut, and what travels between stages.

    Returns:
        The spec with what was settled of it, the samples by which that was found, and what every rank found alike.
    """
    if isinstance(spec.loss_fn, nn.Module):
        in_dtype(spec.loss_fn, spec.precision.dtype, world.device)
    check_consistent(store, world.rank, world.size, given, found=False, initial=partitioned.initial)
    samples = samples_of.share(store, samples_of.take(*loaders, plan), rank=world.rank, size=world.size)
    if isinstance(samples.one[1], Several):
        spec = replace(spec, loss_fn=TreeTargetLoss(spec.loss_fn))
    links, measuring = links_between(partitioned.spec.links, world, store, folder), None
    if loaders.first is not None:
        measuring = Measuring(loaders.first, plan.micro_batch_size, folder, world.stages_on_device, links)
    finalize = partial(partitioned.finalize, store, samples=samples, device=world.device, measuring=measuring)
    spec, agreed = tried(spec, samples, loaders.first, finalize)
    found = {**agreed.plain(), "sizes": partitioned.sizes}
    check_consistent(store, world.rank, world.size, found, found=True)
    return spec, samples, agreed


def placed_stages(
    spec: TrainSpec, partitioned: PartitionedModel, agreed: Agreed, device: torch.device
) -> dict[int, Stage]:
    """Return the stages of this process, with their modules on ``device``; what they share is found there."""
    modules = {k: spec.precision.place(module, device) for k, module in partitioned.modules.items()}
    tied = {k: partitioned.ties.of_stage(k, module) for k, module in modules.items()}
    return {k: build_stage(module, k, spec, agreed, device, tied[k]) for k, module in modules.items()}


def rehearse(
    contexts: Mapping[int, StageContext],
    spec: TrainSpec,
    world: World,
    loaders: Loaders,
    samples: Samples,
    agreed: Agreed,
) -> None:
    """Do beforehand what would make the first micro-batches wait."""
    device = world.device
    if samples.varies or any(specs.varies for specs in agreed.acts.values()):
        check_without_warm_up(world.backend)
    elif needs_warm_up(spec, device):
        warm_up(
            contexts, spec, device, agreed.acts, samples, loss_terms(spec.loss_fn, samples.one[1], spec.loss_reduction)
        )
        if world.backend == "nccl":
            num_loaded = loaders.training.num_loaded if loaders.training is not None else 0
            warm_up_updates(contexts, spec, device, agreed.acts, samples, num_loaded=num_loaded)


def tried(
    spec: TrainSpec, samples: Samples, loader: DeviceLoader | None, finalize: Callable[..., Settled]
) -> tuple[TrainSpec, Agreed]:
    """Return the spec with what the trial has settled of it, and what that has found.

    ``finalize`` makes the trial with ``samples``, whose targets are those that ``loader`` loads.

    Raises:
        ConfigError, PartitionError, DataError: the model cannot be trained with this loss on these targets.
    """

    def check(spec: TrainSpec) -> None:
        if loader is None:
            return
        loader.expect(spec, loss_terms(spec.loss_fn, samples.one[1], spec.loss_reduction), num_outputs=None)
        for target in (batch.target for batch in samples.pair):
            if isinstance(target, Tensor) and not target.is_floating_point():
                loader.check(target, "micro-batch 0 of epoch 1")

    if class_loss(spec.loss_fn) is not None:
        check(spec)
    found = None
    try:
        found = finalize(spec)
    except ReturnsSumError as pair:  # whatever it counts, which is only known now
        spec = replace(spec, loss_fn=SumCountLoss(spec.loss_fn, pair.target, pair.count))
    except ConfigError:
        check(spec)  # an ignored target may be why
        raise
    if found is None:
        found = finalize(spec)
    check(found.spec)
    return found.spec, found.agreed


def unit_of(samples: Samples, loss_fn: LossFn, terms: LossTerms | None) -> str:
    """Return the unit of the speed of training: ``images``, ``tokens``, or ``samples`` of anything else."""
    first, target = tensors_of(samples.one[0])[0], tensors_of(samples.one[1])[0]
    classes = class_loss(loss_fn)
    is_text = not first.is_floating_point() and first.ndim == 2 and target.ndim == 2 and not target.is_floating_point()
    if is_text and terms is not None and (classes is None or classes.weight is None):
        return TOKENS
    return "images" if first.is_floating_point() and first.ndim == 4 else "samples"


def settings_of(spec: TrainSpec, partitioned: PartitionedModel) -> dict[str, object]:
    """Return the plain values that two ranks, or a run and its continuation, must have in common."""
    balance = partitioned.spec.balance
    rules = {"rules": spec.optimizer.settings} if isinstance(spec.optimizer, RuledOptimizer) else {}
    return {
        **spec.settings,
        **rules,
        "balance": balance if isinstance(balance, str) else list(balance),
        "tied": partitioned.spec.tied,
        "model": {name: list(shape) for name, shape in partitioned.signature.items()},
    }


def sample_optimizer(factory: OptimizerFactory) -> Settings | str:
    """Describe the optimizer that ``factory`` makes for one small matrix, or its error.

    The optimizers of two stages may well differ, so ranks compare those that they make for the same parameter.
    """
    try:
        return merged([described_optimizer(factory([nn.Parameter(torch.zeros(2, 2))]))])
    except Exception as error:  # it may accept the parameters of the stages, but no matrix alone
        return f"{type(error).__name__}: {error}"


def settings_made(spec: TrainSpec, made: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the optimizer and schedule by which the run of a script is recognised, from those of all stages."""
    optimizer, schedule = (
        merged(one[kind] for one in made if kind in one) or None for kind in ("optimizer", "lr_schedule")
    )
    if schedule is not None:
        schedule = {"made_by": described(spec.lr_schedule), **schedule}
    return {"optimizer": optimizer, "lr_schedule": schedule}


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile lacks what it makes kernels for ``device`` with."""
    # Imported late: it takes a second.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    missing = "Triton" if device.type == "cuda" and not has_triton() else None
    try:
        get_cpp_compiler()  # of which kernels for a GPU need one, too
    except RuntimeError:
        missing = "a C++ compiler (g++, or the one that the variable CXX names)"
    if missing is not None:
        raise ConfigError(
            f"runtime.compile=true needs {missing}, and there is none; install it, or omit runtime.compile"
        )


def check_sizes(pipeline: Pipeline, sizes: Iterable[int]) -> None:
    """Raise ConfigError for a head with BatchNorm over the features of one single sample."""
    method = pipeline.method
    if pipeline.spec.has_heads and pipeline.num_stages > 1 and normalises_samples(method) and 1 in sizes:
        option, without = f"method.head={method.head}", "method.head=linear"
        if pipeline.spec.predicts_gradients:
            option, without = f"method.head_layers={method.head_layers}", "method.head_layers=0"
        raise ConfigError(
            f"a micro-batch of the training data holds a single sample, which BatchNorm in {option} cannot normalise; "
            f"choose another train.batch_size, or {without}"
        )


def check_targets(pipeline: Pipeline, agreed: Agreed) -> None:
    """Raise ConfigError if a head lacks the classes that it needs, or if local losses would share a state.

    Every rank finds it alike.
    """
    target, shown = agreed.targets[0], ", ".join(map(str, agreed.targets))
    is_class = len(agreed.targets) == 1 and not target.is_floating_point and not target.shape
    has_classes = agreed.num_classes is not None and is_class
    if pipeline.method.head_sees_target and pipeline.num_stages > 1 and not has_classes:
        raise ConfigError(
            "method.head_sees_target=true tells heads the class of each sample, but the targets are "
            f"{shown}; expected one whole number per sample and a model that returns [B, classes]: use "
            "method.head_sees_target=false"
        )
    if not pipeline.spec.local_losses:
        return
    if (moves := agreed.traits[0].loss.moves) and pipeline.num_stages > 1:
        raise ConfigError(
            f"the loss keeps something of its own, which changes with each call ({', '.join(moves[:3])}), but "
            f"method={pipeline.method.name} has a local loss on each stage, and they would share it; let the loss "
            "depend on nothing but output and target, or use partition.num_stages=1"
        )
    if pipeline.method.head == "predsim" and not is_class:
        raise ConfigError(
            f"method.head=predsim compares samples by their class, but the targets are {shown}; expected one whole "
            "number per sample: choose another method.head"
        )
    if pipeline.num_stages > 1 and agreed.num_classes is None:
        raise ConfigError("method=dgl needs a model that returns [B, classes], or there is nothing to learn locally")


def build_stage(
    module: nn.Module,
    k: int,
    spec: TrainSpec,
    agreed: Agreed,
    device: torch.device,
    tied: Mapping[int, Mapping[str, nn.Parameter]],
) -> Stage:
    """Build the stage that trains ``module``, part k of the model on ``device``; ``tied`` is what it shares."""
    method = spec.pipeline.method
    head: nn.Module | None = None
    if method.spec.has_heads and k < spec.pipeline.num_stages - 1:
        shape, seed = agreed.acts[k + 1].training[0].shape, stream_seed(spec.seed, "head", k)
        if method.spec.predicts_gradients:
            head = build_gradient_network(method, shape, num_classes=agreed.num_classes, seed=seed)
        else:
            assert agreed.num_classes is not None
            head = build_head(method.head, shape, num_classes=agreed.num_classes, seed=seed)
        spec.precision.place(head, device)
        for classifier in head.children():  # each makes outputs of its own
            mark_roles(classifier, prefix="head:")
    return Stage(module, k, spec, device=device, head=head, traits=agreed.traits[k], tied=tied)


def schedule_learning_rates(
    stages: Mapping[int, Stage], spec: TrainSpec, plan: Plan, store: dist.Store
) -> tuple[list[dict[str, Any]], dict[int, set[str]]]:
    """Give each stage with an optimizer the schedule of ``spec``, if it has one, where the method has it start.

    Returns:
        The settings in optimizer and schedule of each stage, and by stage the keys of groups that the schedule sets.

    Raises:
        ConfigError: the schedule cannot be made, or is shorter than the run.
    """
    if 0 in stages:  # only the process with the data knows how long an epoch is
        lengths = {"updates_per_epoch": plan.updates_per_epoch, "total_updates": plan.total_updates}
        store.set(LENGTH, json.dumps(lengths))
    length = read(store, LENGTH, 0)
    made: list[dict[str, Any]] = []
    scheduled: dict[int, set[str]] = {}
    for k, learner in ((k, learner) for k, stage in stages.items() for learner in stage.learners):
        if learner.optimizer is None:
            continue
        held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
        left = [name for name, p in learner.named_parameters() if p.requires_grad and id(p) not in held]
        if left and plan.epochs:  # there is a training
            warn(
                f"{learner.where}: {', '.join(left[:3])}{' ..' * (len(left) > 3)} are in no group of the optimizer and "
                "are not trained; set requires_grad=False if that is meant. An optimizer gets those of its stage"
            )
        made.append({"optimizer": described_optimizer(learner.optimizer)})
        if spec.lr_schedule is None:
            continue
        make = partial(build_lr_schedule, spec.lr_schedule, learner.optimizer, **length)
        tried = next(iter(scheduled.values()), None)  # one for all: a schedule knows no stage
        scheduled[k] = try_schedule(make, learner.optimizer, length["total_updates"]) if tried is None else tried
        lead = spec.pipeline.lr_lead(k)
        learner.lr_schedule = make()
        made[-1]["lr_schedule"] = {"name": [class_name(type(learner.lr_schedule))]}
        learner.lr_updates = length["total_updates"] - lead
        fast_forward(learner.lr_schedule, min(lead, length["total_updates"]))
    return made, scheduled
