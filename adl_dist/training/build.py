"""Assembly of a process's worker: agreed cut, stages and connections."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adl_dist.batch import tensors_of
from adl_dist.checkpoint.identity import class_name, described_optimizer, merged, plain
from adl_dist.control.worker import LocalWorker
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.optim import build_lr_schedule, fast_forward, try_schedule
from adl_dist.optimizers import mark_roles
from adl_dist.optimizers.rules import RuledOptimizer
from adl_dist.report.progress import TOKENS
from adl_dist.report.warning import warn
from adl_dist.schedule import Pipeline
from adl_dist.seeds import stream_seed
from adl_dist.stage import LossFn, OptimizerFactory, Stage, TrainSpec, in_dtype
from adl_dist.stage.calls import Compiler
from adl_dist.stage.heads import build_gradient_network, build_head, normalises_samples
from adl_dist.stage.loss import LossTerms, class_loss, loss_terms
from adl_dist.stage.model_norm import MISSING, ModelNorm
from adl_dist.training.edges import COUNTS, connect_stages
from adl_dist.training.measured import links_between, unit_of_inputs
from adl_dist.training.partitioned_model import PartitionedModel, PartitionResult, Startup, parameters_by_name
from adl_dist.training.startup_sync import Agreement, check_consistent
from adl_dist.training.trial.samples import Samples, share, take
from adl_dist.training.trial.stage_run import TrialResult
from adl_dist.training.warm_up import WarmUp, check_without_warm_up, needs_warm_up, unchanged

Settings = dict[str, Any]


def settle_partition(spec: TrainSpec, partitioned: PartitionedModel, startup: Startup) -> PartitionResult:
    """Settle the cut, the loss and the tensors between stages.

    Return the spec with the settled values, the result of the trial, the samples of this call, and the trained
    parameters of this process. All but the last are the same on every rank.

    Raises:
        ConfigError, PartitionError, DataError: If ranks disagree, or the model cannot be cut or trained like this.
    """
    world, agreement, loaders, plan = startup.world, startup.agreement, startup.loaders, startup.plan
    check_sizes(spec.pipeline, plan.first_epoch.sizes)
    if spec.precision.compile:
        check_compiler(world.device)
    given = {**settings_of(spec, partitioned), **plan.as_given}
    if isinstance(spec.loss_fn, nn.Module):
        in_dtype(spec.loss_fn, spec.precision.dtype, world.device)
    if world.size > 1 and plan.epochs:
        given = {**given, "optimizer": sample_optimizer(spec.optimizer)}
    check_consistent(agreement, given, partitioned.initial)
    samples = share(agreement, take(*loaders, plan))
    links = links_between(partitioned.spec.links, world, agreement, startup.folder)
    found = partitioned.finalize(startup, spec, samples, links)
    check_consistent(agreement, {"cut": partitioned.sizes})
    return found._replace(samples=samples)


def build_worker(
    settled: PartitionResult, partitioned: PartitionedModel, startup: Startup
) -> tuple[LocalWorker, Settings]:
    """Build the worker of this process after :func:`settle_partition`.

    Returns:
        The worker, and the settings in the optimizers and learning rate schedules of all stages; the same on each rank.

    Raises:
        ConfigError: If an optimizer or a learning rate schedule cannot be made, or a head lacks class targets.
    """
    spec, result, samples, _ = settled
    world, loaders = startup.world, startup.loaders
    terms = loss_terms(spec.loss_fn, samples.one[1], spec.loss_reduction)
    check_targets(spec.pipeline, result)
    modules = {k: spec.precision.place(module, world.device) for k, module in partitioned.modules.items()}
    make_stages = partial(build_stages, modules, spec, partitioned, result, world.device, Compiler())
    if samples.varies or any(specs.varies for specs in result.acts.values()):
        check_without_warm_up(world.backend)
    elif needs_warm_up(spec, world.device):
        num_loaded = loaders.training.num_loaded if loaders.training is not None else 0
        warm_up = WarmUp(spec, world.device, result.acts, samples, terms, num_loaded, world.backend == "nccl")
        loss = [spec.loss_fn] if isinstance(spec.loss_fn, nn.Module) else []
        with unchanged([*modules.values(), *loss], world.device):
            warm_up.run(make_stages())
    stages = make_stages()
    if partitioned.ties and startup.plan.epochs:
        check_copies(stages, startup.agreement)
    made = schedule_learning_rates(stages, spec, startup) if startup.plan.epochs else []
    # The factories are the user's own: if one fails, no rank begins to wait for that stage.
    all_made = [one for by_rank in startup.agreement.all(made) for one in by_rank]
    for loader in loaders:
        if loader is not None:
            loader.precision = spec.precision
            loader.expect(spec, terms, num_outputs=result.num_outputs)
    targets = [*result.targets] if terms is None else [*result.targets, COUNTS]
    contexts = connect_stages(world, stages, result.acts, targets, spec.pipeline, spec.precision.codecs)
    if 0 in contexts:
        contexts[0].num_inputs = len(tensors_of(samples.one[0]))
    worker = LocalWorker(
        world,
        spec.pipeline,
        spec.precision.dtype,
        contexts,
        *loaders,
        terms,
        unit=unit_of(samples, spec.loss_fn, terms),
        saves=startup.folder is not None,
    )
    return worker, settings_made(spec, all_made)


def unit_of(samples: Samples, loss_fn: LossFn, terms: LossTerms | None) -> str:
    """Return the unit of speed: tokens, images, sequences or samples."""
    first, target = tensors_of(samples.one[0])[0], tensors_of(samples.one[1])[0]
    classes = class_loss(loss_fn)
    is_text = not first.is_floating_point() and first.ndim == 2 and target.ndim == 2 and not target.is_floating_point()
    if is_text and terms is not None and (classes is None or classes.weight is None):
        return TOKENS
    return unit_of_inputs(first)


def settings_of(spec: TrainSpec, partitioned: PartitionedModel) -> Settings:
    """Return the settings, equal on all ranks, that identify a run folder."""
    balance = partitioned.spec.balance
    rules = {"rules": spec.optimizer.settings} if isinstance(spec.optimizer, RuledOptimizer) else {}
    return {
        **spec.settings,
        **rules,
        "balance": balance if isinstance(balance, str) else list(balance),
        "tied": partitioned.spec.tied,
        "loss": {"name": class_name(spec.loss_fn)},
        "model": {name: list(shape) for name, shape in partitioned.signature.items()},
    }


def sample_optimizer(factory: OptimizerFactory) -> Settings | str:
    """Return the settings of an optimizer of one small matrix, or its error.

    The optimizers of two stages may well differ, so ranks compare those that they make for the same parameter.
    """
    try:
        return merged([described_optimizer(factory([nn.Parameter(torch.zeros(2, 2))]))])
    except Exception as error:  # it may accept the parameters of the stages, but no matrix alone
        return in_one_line(error)


def settings_made(spec: TrainSpec, made: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of optimizer and schedule that identify a run."""
    optimizer, schedule = (
        merged(one[kind] for one in made if kind in one) or None for kind in ("optimizer", "lr_schedule")
    )
    if schedule is not None:
        schedule = {"made_by": {"name": class_name(spec.lr_schedule)}, **schedule}
    return {"optimizer": optimizer, "lr_schedule": schedule}


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile lacks a compiler for ``device``."""
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
    """Raise ConfigError if BatchNorm in a head would get a single sample."""
    method = pipeline.method
    if pipeline.spec.has_heads and pipeline.num_stages > 1 and normalises_samples(method) and 1 in sizes:
        option, without = f"method.head={method.head}", "method.head=linear"
        if pipeline.spec.predicts_gradients:
            option, without = f"method.head_layers={method.head_layers}", "method.head_layers=0"
        raise ConfigError(
            f"a micro-batch of the training data holds a single sample, which BatchNorm in {option} cannot normalise; "
            f"choose another train.batch_size, or {without}"
        )


def check_targets(pipeline: Pipeline, result: TrialResult) -> None:
    """Raise ConfigError if a head lacks the classes that it needs."""
    method, has_heads = pipeline.method, pipeline.num_stages > 1
    target, is_local = result.targets[0], pipeline.spec.local_losses
    is_class = len(result.targets) == 1 and not target.is_floating_point and not target.shape
    needs_target = (method.head_sees_target and has_heads) or (is_local and method.head == "predsim")
    needs_output = has_heads and (method.head_sees_target or is_local)
    if (needs_target and not is_class) or (needs_output and result.num_classes is None):
        raise ConfigError(
            f"heads of method={method.name} learn the class of each sample, but the targets are "
            f"{', '.join(map(str, result.targets))}; expected one whole number per sample, and a model that returns "
            "[B, classes]: use another method.head, method.head_sees_target=false, or another method"
        )


def build_stages(
    modules: Mapping[int, nn.Module],
    spec: TrainSpec,
    partitioned: PartitionedModel,
    result: TrialResult,
    device: torch.device,
    compiler: Compiler,
) -> dict[int, Stage]:
    """Build the stages that train ``modules`` on ``device``."""

    def spec_of(k: int) -> TrainSpec:
        is_shared = k == spec.pipeline.num_stages - 1 or not spec.pipeline.spec.local_losses
        is_shared |= not isinstance(spec.loss_fn, nn.Module)
        return spec if is_shared else replace(spec, loss_fn=copy.deepcopy(spec.loss_fn))

    stages = {
        k: Stage(
            module,
            k,
            spec_of(k),
            device=device,
            head=build_stage_head(k, spec, result, device),
            info=result.infos[k],
            tied={
                number: {name: parameters_by_name(module)[name] for name in names}
                for number, (holders, names) in enumerate(partitioned.ties.items())
                if k in holders
            },
            compiler=compiler if spec.precision.compile else None,
        )
        for k, module in modules.items()
    }
    if spec.gradients.clips_model(spec.pipeline):
        # A model that is not cut may have other parameters than at the start.
        is_cut = spec.pipeline.num_stages > 1
        names = partitioned.parameters if is_cut else [name for name, _ in modules[0].named_parameters()]
        missing = torch.tensor(MISSING, dtype=spec.precision.dtype, device=device)
        for stage in stages.values():
            named = stage.named_parameters(remove_duplicate=False)
            stage.model_norm = ModelNorm(names, named, stage.ties.values(), missing)
    return stages


def check_copies(stages: Mapping[int, Stage], agreement: Agreement) -> None:
    """Raise ConfigError if copies of a tied weight have different options.

    A factory that knows a weight by its object does not know the copies.
    """
    own = [
        [name, k, _options_of(parameter, tied.optimizer)]
        for k, stage in stages.items()
        for tied in stage.ties.values()
        for name, parameter in tied.named_parameters()
    ]
    found: dict[str, tuple[int, Any]] = {}
    for name, k, options in (one for by_rank in agreement.all(own) for one in by_rank):
        first, expected = found.setdefault(name, (k, options))
        if options != expected:
            differs = [key for key in {**expected, **options} if options.get(key) != expected.get(key)]
            of = [{key: known.get(key) for key in differs} if known else "no group" for known in (expected, options)]
            raise ConfigError(
                f"the copies of '{name}' on stages {first} and {k} would train differently: {of[0]} and {of[1]}; "
                "probably the optimizer chooses groups by objects, and each stage has a copy; choose by shape, by an "
                "attribute that you set on the parameter, or by adl_dist.optimizers.with_rules"
            )


def _options_of(parameter: nn.Parameter, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the options of the group of ``parameter``; empty without one."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if any(parameter is one for one in group["params"]):
            return {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {}


def build_stage_head(k: int, spec: TrainSpec, result: TrialResult, device: torch.device) -> nn.Module | None:
    """Build the local head of stage ``k``, or return None if it has none."""
    method = spec.pipeline.method
    if not method.spec.has_heads or k == spec.pipeline.num_stages - 1:
        return None
    shape, seed = result.acts[k + 1].training[0].shape, stream_seed(spec.seed, "head", k)
    head: nn.Module
    if method.spec.predicts_gradients:
        head = build_gradient_network(method, shape, num_classes=result.num_classes, seed=seed)
    else:
        assert result.num_classes is not None
        head = build_head(method.head, shape, num_classes=result.num_classes, seed=seed)
    spec.precision.place(head, device)
    for classifier in head.children():  # each makes outputs of its own
        mark_roles(classifier, prefix="head:")
    return head


def schedule_learning_rates(stages: Mapping[int, Stage], spec: TrainSpec, startup: Startup) -> list[dict[str, Any]]:
    """Build the learning rate schedule of each optimizer, if ``spec`` has one.

    Returns:
        A dictionary for each optimizer: its settings as ``optimizer`` and, with a schedule, ``lr_schedule``.

    Raises:
        ConfigError: If the schedule cannot be made, or is shorter than the run.
    """
    plan = startup.plan  # only rank 0, with the data, knows how long an epoch is
    length = {"updates_per_epoch": plan.updates_per_epoch, "total_updates": plan.total_updates}
    length = startup.agreement.first(length)
    made: list[dict[str, Any]] = []
    scheduled: set[str] | None = None
    for k, learner in ((k, learner) for k, stage in stages.items() for learner in stage.learners):
        optimizer = learner.optimizer
        if optimizer is None:
            continue
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if left := [name for name, p in learner.named_parameters() if p.requires_grad and id(p) not in held]:
            warn(
                f"{learner.where}: {', '.join(left[:3])}{' ..' * (len(left) > 3)} are in no group of the optimizer and "
                "are not trained; set requires_grad=False if that is meant. An optimizer gets those of its stage"
            )
        made.append({"optimizer": described_optimizer(optimizer)})
        if spec.lr_schedule is None:
            continue
        make = partial(build_lr_schedule, spec.lr_schedule, optimizer, **length)
        if scheduled is None:  # one for all: a schedule knows no stage
            scheduled = try_schedule(make, optimizer, length["total_updates"])
        lead = spec.pipeline.lr_lead(k)
        learner.scheduled, learner.lr_schedule = scheduled, make()
        made[-1]["lr_schedule"] = {"name": [class_name(type(learner.lr_schedule))]}
        learner.lr_updates = length["total_updates"] - lead
        fast_forward(learner.lr_schedule, min(lead, length["total_updates"]))
    return made
