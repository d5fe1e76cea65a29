"""The cut model: units by stage, and the stages in this process."""

import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_structure

from adl_dist.batch import tensors_of
from adl_dist.checkpoint.nested import is_extra_state
from adl_dist.checkpoint.state import signature
from adl_dist.codecs import PLAIN
from adl_dist.distributed.world import World
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.links import Links
from adl_dist.optimizers import take_role
from adl_dist.partition import Chain, Machine, StageModule, checked_sizes, even_sizes, flops_sizes
from adl_dist.partition.balance import Balance
from adl_dist.partition.chain import copied_model
from adl_dist.partition.costs import Profile, UnitCost
from adl_dist.partition.cut import attempt, begins_of, loads_of
from adl_dist.partition.imbalance import why_uneven
from adl_dist.partition.predict import best_cut, unevenness, with_delays
from adl_dist.partition.stage_plan import StagePlan
from adl_dist.schedule import Pipeline
from adl_dist.schedule.run_plan import Plan
from adl_dist.stage import TrainSpec
from adl_dist.training.input import Loaders
from adl_dist.training.lazy_weights import LazyWeights
from adl_dist.training.measured import (
    PROFILE_FILE,
    device_memory,
    flops_per_sample,
    peak_tflops,
    read_delays,
    take_profile,
)
from adl_dist.training.options import PartitionSpec
from adl_dist.training.startup_sync import Agreement, sampled
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.stage_run import TrialResult
from adl_dist.training.trial.trial import Trial, attempts, check_trains
from adl_dist.transport.coding_speed import coding_costs
from adl_dist.transport.spec import TensorSpec

Ties = dict[tuple[int, ...], list[str]]  # of the stages that hold copies, the first names of the parameters

logger = logging.getLogger("adl_dist")


@dataclass(frozen=True)
class Startup:
    """The means of agreement between the ranks at the start of a run."""

    world: World
    agreement: Agreement
    loaders: Loaders  # the data, in the process of stage 0
    plan: Plan  # the length of the run for that data
    folder: Path | None  # the run folder, which keeps measurements, if there is one


class PartitionResult(NamedTuple):
    """The spec and the trial that all ranks have agreed on, with its samples."""

    spec: TrainSpec  # with the memory format
    result: TrialResult
    samples: Samples
    trained: frozenset[str]  # parameters of this process's stages that took a gradient then

    def holds_for(self, samples: Samples) -> bool:
        """Return whether ``samples`` have the same specs as those of the trial."""
        alike = [
            [(tree_structure(of), *map(TensorSpec.of, tensors_of(of))) for of in one.pair[0]]
            for one in (self.samples, samples)
        ]
        return alike[0] == alike[1] and self.samples.varies == samples.varies


@dataclass
class _Measured:
    """Measured costs, the delays that follow from them, and the best cut."""

    profile: Profile
    pipeline: Pipeline
    machine: Machine
    balance: Balance = field(init=False)  # of the last choice

    def units_of(self, chain: Chain) -> list[UnitCost]:
        """Return the units, with no cut where ``chain`` forbids it."""
        return [replace(u, may_cut=u.may_cut and n not in chain.forbidden) for n, u in enumerate(self.profile.units)]

    def best_sizes(self, chain: Chain) -> list[int]:
        """Return the units per stage of the best cut that ``chain`` allows."""
        allowed = replace(self.profile, units=self.units_of(chain))
        self.balance = best_cut(allowed, self.pipeline, machine=self.machine)
        return self.balance.sizes


@dataclass
class PartitionedModel:
    """A model and its cut, made before the first step.

    Raises:
        ConfigError: If the speeds in ``spec`` do not fit K, or a model on meta would have to be measured.
    """

    model: InitVar[nn.Module]
    num_stages: int
    spec: PartitionSpec  # where to cut
    own: list[int]  # the stages that this process keeps
    weights: LazyWeights | None  # what makes the tensors of these stages, if the model is on meta
    begins: list[str] = field(default_factory=list)  # units where stages 1.. begin; before the cut: of a resumed run
    sizes: list[int] | None = None  # units of each stage; None before it is cut
    stage_units: list[tuple[int, str, str]] = field(default_factory=list)  # of each: number of units, first, last
    ties: Ties = field(default_factory=dict)  # the weights of which several stages hold a copy
    notes: list[str] = field(default_factory=list)  # what the user should know of the cut, a line each
    warning: str | None = None  # why the cut leaves most of the work to one stage, where that is known
    flops: float | None = None  # of forward and backward of a sample, as a share of a device's peak in a second
    peak_tflops: float | None = None  # of a device, if that is given

    def __post_init__(self, model: nn.Module) -> None:
        Machine(speeds=self.spec.speeds).speeds_of(self.num_stages)  # refuses another number of them
        if self.weights is not None and self.spec.balance == "auto":
            raise ConfigError(
                "partition.balance=auto measures units with their weights, but the model is on torch.device('meta'); "
                "use flops, or the list that adl-dist plan prints, or build the model with its weights "
                "(runtime.meta_init=false)"
            )
        self.signature = signature(model)  # names and shapes of all parameters and buffers of the uncut model
        self.parameters = [name for name, _ in model.named_parameters()]  # their first names, in its order
        self.num_parameters = sum(p.numel() for p in model.parameters())
        state = model.state_dict()
        # Samples of the weights that training begins with; none for those of a checkpoint.
        self.initial = sampled((name, state[name]) for name in self.signature)
        self.modules: dict[int, nn.Module] = dict.fromkeys(self.own, model)  # the stages; the whole until it is cut
        self._model: nn.Module | None = model  # until a process has only some of the stages
        self._settled: PartitionResult | None = None
        self._home: dict[str, tuple[int, torch.dtype]] = {}

    def full_state_dict(self, *, distributed: bool) -> dict[str, Any]:
        """Return the tensors of the whole model on the CPU.

        If ``distributed``, every rank must call it. The extra state of modules is included only for this process's
        stages; checkpoints have all of it.
        """
        if self.sizes is None and self.weights is not None:
            raise ConfigError("the model is on torch.device('meta') until fit or evaluate has made each process's part")
        for module in self.modules.values():
            if isinstance(module, StageModule):
                with suppress(PartitionError):  # a new model may be made of this one's parts
                    module.take_changes()
        own = {k: module.state_dict() for k, module in self.modules.items()}
        if self.sizes is None or self.num_stages == 1:  # its modules may be others than at the start
            return {name: _plain(tensor) for name, tensor in own[self.own[0]].items()}
        full: dict[str, Any] = {}
        for name, (stage, dtype) in self._home.items():
            tensor = _plain(own[stage][name]) if stage in own else torch.empty(self.signature[name], dtype=dtype)
            if distributed:
                dist.broadcast(tensor, src=stage % dist.get_world_size())
            full[name] = tensor
        extra = {name: value for state in own.values() for name, value in state.items() if is_extra_state(name)}
        return {name: full[name] for name in self.signature} | extra

    def give_state(self) -> None:
        """Copy extra state and replaced buffers into the user's model."""
        for module in self.modules.values():
            if isinstance(module, StageModule):
                module.give_state()

    def finalize(
        self,
        startup: Startup,
        spec: TrainSpec,
        samples: Samples,
        links: Links | None,
    ) -> PartitionResult:
        """Cut the model, and compare its stages with the uncut model.

        The result, except ``trained``, is the same on every rank. Only the process of stage 0 has data, so it measures
        for ``balance=auto``. ``links`` are the links between stages, or None if they take no time.

        Raises:
            ConfigError: If a stage or the loss does not accept its input, or there is nothing to train.
            PartitionError: If the model cannot be cut like that, no cut fits into memory, or the stages compute other
                values than the uncut model.
        """
        if self._settled is not None and (known := self._known(samples)) is not None:
            return known._replace(spec=replace(known.spec, gradients=spec.gradients))  # which a resumed run may keep
        assert self._model is not None
        model, device, feed = self._model, startup.world.device, startup.loaders.first
        for block in attempts(model, spec, samples):
            with block as tried:
                trial, chain = Trial(model, tried, samples, device), None
                if self.num_stages > 1 or not isinstance(self.spec.balance, str):
                    chain = trial.chain(granularity=self.spec.granularity)
                tried, result, sizes = self._choose(trial, chain, startup, links)
        if trial.note is not None:
            self._note(trial.note)
        self._cut(chain, sizes)
        if self.ties:
            tried = replace(tried, pipeline=replace(tried.pipeline, tied=tuple(self.ties)))
        if self.weights is not None:
            for module in self.modules.values():
                self.weights.make(module)
            self.weights = None
        if spec.precision.channels_last is None and not tried.precision.channels_last:
            self._note("channels_last is off: the model runs in the plain memory format only")
        peak = peak_tflops(self.peak_tflops, spec, device)
        if peak is not None and feed is not None and not trial.is_lazy and result.learns:
            flops = flops_per_sample(copied_model(trial.model), tried, trial.samples, trial.device)
            self.flops = None if flops is None else flops / (1e12 * peak)
        self._settled = PartitionResult(tried, result, samples, self._trained())
        return self._settled

    def _choose(
        self, trial: Trial, chain: Chain | None, startup: Startup, links: Links | None
    ) -> tuple[TrainSpec, TrialResult, list[int]]:
        """Choose the cut; return the spec with delays, the trial's result, sizes."""
        spec, delays, balance = trial.spec, trial.spec.pipeline.nominal_delays, self.spec.balance
        if chain is None or self.num_stages == 1:
            if chain is not None:
                checked_sizes(chain, 1, balance)
            result, sizes = trial.run(), [1]
        else:
            fixed = None if balance == "auto" else self._fixed_sizes(chain)
            measured = self._measure(trial, chain, startup, links) if balance == "auto" else None
            if measured is not None:
                delays = measured.pipeline.nominal_delays
            # A head takes the one tensor that blocks hand on.
            by_work = partial(flops_sizes, opens=not spec.pipeline.spec.has_heads)

            def choose() -> list[int]:
                if balance == "auto":
                    return list(startup.agreement.first(measured and measured.best_sizes(chain)))
                return fixed or (by_work if balance == "flops" else even_sizes)(chain, self.num_stages)

            def run(sizes: list[int]) -> tuple[TrialResult, list[int]]:
                return trial.run(chain, sizes, verify=self.spec.verify), sizes

            result, sizes = attempt(chain, choose, run, fixed=fixed is not None)
            self._describe(chain, sizes, measured, is_fixed=fixed is not None)
        if spec.pipeline.method.awaits_delays:
            method = spec.pipeline.method.with_delays(tuple(startup.agreement.first(delays)))
            spec = replace(spec, pipeline=Pipeline(method, self.num_stages))
        return spec, result, sizes

    def _describe(self, chain: Chain, sizes: list[int], measured: _Measured | None, *, is_fixed: bool) -> None:
        """Add notes on the cut, and a warning with the cause if it is uneven."""
        if measured is not None:
            shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in measured.balance.stage_seconds)
            self._note(f"measured {cut_note(chain, sizes)}; {shown} ms per micro-batch")
            self.warning = unevenness(measured.units_of(chain), measured.balance)
            return
        self._note(cut_note(chain, sizes))
        reasons = [chain.forbidden.get(unit, "") for unit in range(len(chain.units))]
        if not is_fixed and any(reasons):
            is_flops = self.spec.balance == "flops"
            loads, of = (loads_of(chain, sizes), "the work") if is_flops else (sizes, "the units")
            self.warning = why_uneven(chain.units, reasons, sizes, loads, of=of)

    def _fixed_sizes(self, chain: Chain) -> list[int] | None:
        """Return the units per stage of a given or a resumed cut, or None."""
        if not isinstance(self.spec.balance, str):
            return checked_sizes(chain, self.num_stages, self.spec.balance)
        if self.begins:
            try:
                return checked_sizes(chain, self.num_stages, self.begins)
            except PartitionError as error:
                self._note(f"the cut of the checkpoint is not used: {error}")
        return None

    def _measure(self, trial: Trial, chain: Chain, startup: Startup, links: Links | None) -> _Measured | None:
        """Measure the units, and choose the delays left open by the method.

        Return None without data. Values depend on delays, so a run keeps its delays, whatever is measured when it
        continues.
        """
        folder, spec, feed = startup.folder, trial.spec, startup.loaders.first
        if feed is None:
            return None
        profile = take_profile(
            copied_model(trial.model),
            chain,
            spec,
            trial.samples.one,
            micro_batch_size=startup.plan.micro_batch_size,
            kept_in=None if folder is None else folder / PROFILE_FILE,
            feed=feed,
        )
        if spec.precision.codecs != PLAIN and not profile.coding:
            profile = replace(profile, coding=coding_costs(trial.device))
            if folder is not None:  # the same command is to make the same cut
                profile.save(folder / PROFILE_FILE)
        machine = Machine(
            speeds=self.spec.speeds,
            memory_bytes=device_memory(trial.device, -(-self.num_stages // startup.world.size)),
            codecs=spec.precision.codecs,
            coding=profile.coding,
            **({} if links is None else links.figures),
        )
        if links is not None:
            self._note(f"links between stages: {links}")
        pipeline = spec.pipeline
        if pipeline.method.awaits_delays:
            kept = None if folder is None else read_delays(folder, self.num_stages)
            if kept is None:
                pipeline = with_delays(profile, pipeline, machine=machine)
            else:
                pipeline = Pipeline(pipeline.method.with_delays(kept), self.num_stages)
            whose = "measured delays" if kept is None else "delays of this run"
            self._note(f"{whose}: {list(pipeline.nominal_delays)} micro-batches")
        return _Measured(profile, pipeline, machine)

    def _known(self, samples: Samples) -> PartitionResult | None:
        """Return the result of an earlier call, if it holds for these samples.

        Raises:
            ConfigError: If it does not hold, and this process has only some stages left; or if a parameter that was
                frozen then is trained now.
        """
        settled = self._settled
        assert settled is not None
        tied = {name for names in self.ties.values() for name in names}
        for module in self.modules.values():
            named = parameters_by_name(module)
            if frozen := [name for name in tied if name in named and not named[name].requires_grad]:
                raise ConfigError(
                    f"'{min(frozen)}', which several stages use, was trained when the model was cut and is frozen now; "
                    "freeze it before the first call, or make a new Trainer, of a model with the weights of "
                    "full_state_dict()"
                )
        if self.num_stages > 1 and (unlike := self._trained() - settled.trained):
            raise ConfigError(
                f"'{min(unlike)}' takes a gradient now, but did not when the model was cut, and stages result then on "
                "the gradients that they send; make a new Trainer, of a model with the weights of full_state_dict()"
            )
        is_new = samples.trains and not settled.samples.trains and self.num_stages == 1  # no backward was looked at
        if not is_new and settled.holds_for(samples):
            if samples.trains:
                check_trains(settled.result, samples)
            return settled
        if self._model is None:
            raise ConfigError(
                "the samples of this call have another shape or dtype than those that the model was cut with; make a "
                "new Trainer for them"
            )
        return None

    def _trained(self) -> frozenset[str]:
        parts = self.modules.values()
        return frozenset(name for part in parts for name, p in part.named_parameters() if p.requires_grad)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        logger.info(text)

    def _cut(self, chain: Chain | None, sizes: list[int]) -> None:
        assert self._model is not None
        self.sizes = sizes
        if chain is None or self.num_stages == 1:
            return
        plan, model = chain.plan(sizes), self._model
        stages = chain.stages(model, plan, sizes, self.own)
        self.begins, self.modules = begins_of(chain, sizes), dict(zip(self.own, stages, strict=True))
        stops = list(accumulate(sizes))
        self.stage_units = [
            (size, chain.units[stop - size], chain.units[stop - 1]) for size, stop in zip(sizes, stops, strict=True)
        ]
        first = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        state = model.state_dict(keep_vars=True)
        owner = {n: plan.holders[n if n in plan.holders else first[id(state[n])]][0] for n in self.signature}
        self._home = {name: (stage, state[name].dtype) for name, stage in owner.items()}
        self.ties, notes = tie_copies(model, plan, stages)
        for note in notes:
            self._note(note)
        if len(self.own) < self.num_stages:
            self._model = None  # of K processes each keeps only its own stage


def cut_note(chain: Chain, sizes: Sequence[int]) -> str:
    """Return a line about a cut: units, shares of the work, opened blocks."""
    stops = [*accumulate(sizes)]
    shown = []
    for k, (stop, size) in enumerate(zip(stops, sizes, strict=True)):
        first, last = chain.units[stop - size], chain.units[stop - 1]
        shown.append(f"stage {k} {first if size == 1 else f'{first} .. {last}'}")
    work = " ".join(f"{share:.0%}".replace("%", " %") for share in loads_of(chain, sizes))
    inside = [chain.block_names[chain.blocks[n]] for n in stops[:-1] if chain.blocks[n] == chain.blocks[n - 1]]
    return f"cut: {', '.join(shown)}; work {work}" + (f"; inside {', '.join(dict.fromkeys(inside))}" if inside else "")


def _plain(tensor: Any) -> Any:
    """Return a copy of ``tensor`` on the CPU; extra state as it is."""
    return tensor if not isinstance(tensor, Tensor) else tensor.detach().cpu().contiguous().clone()


def tie_copies(model: nn.Module, plan: StagePlan, stages: Iterable[StageModule]) -> tuple[Ties, list[str]]:
    """Return the ties of ``model`` cut into ``stages``, and a note on each.

    The copies on ``stages`` get the optimizer roles of the originals.

    Raises:
        PartitionError: If a tied parameter has a hook on its gradient.
    """
    ties: Ties = {}
    notes = []
    for first, parameter in model.named_parameters():
        holders = plan.holders[first]
        for stage in stages:
            if first in stage.copies:  # of a frozen one, too
                take_role(parameters_by_name(stage)[first], parameter)
        if not parameter.requires_grad or len(holders) < 2:
            continue
        _check_unwatched(parameter, first)
        ties.setdefault(holders, []).append(first)
        names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
        notes.append(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} one parameter: stages "
            f"{', '.join(map(str, holders))} each hold a copy and apply the sum of all gradients (partition.tied=share)"
        )
    return ties, notes


def parameters_by_name(stage: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by all of their names."""
    return dict(stage.named_parameters(remove_duplicate=False))


def _check_unwatched(parameter: nn.Parameter, name: str) -> None:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PartitionError(
            f"'{name}' is used on several stages and has a hook on its gradient, which would see a part of it on each "
            "stage that holds a copy; remove the hook, or choose a cut with all its uses on one stage"
        )


def untied(model: nn.Module) -> dict[str, str]:
    """Untie the parameters of ``model`` in place.

    Returns:
        for the name of each new parameter, the name that has kept the shared one.
    """
    kept = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {}
    for module_name, module in model.named_modules():
        for name, parameter in [*module.named_parameters(prefix=module_name, recurse=False, remove_duplicate=False)]:
            if kept[id(parameter)] != name:
                _check_unwatched(parameter, name)
                take_role(twin := copy.deepcopy(parameter), parameter)
                setattr(module, name.rpartition(".")[2], twin)
                names[name] = kept[id(parameter)]
    return names
