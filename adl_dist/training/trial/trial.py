"""The trial at the start: runs of the stages, compared with the model."""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from adl_dist.batch import tensors_of
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.partition import Chain, StageModule
from adl_dist.partition.chain import copied_model
from adl_dist.partition.stage_plan import StagePlan
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import takes_gradient
from adl_dist.stage.info import describe_units, link_stages
from adl_dist.stage.versions import check_versions
from adl_dist.streams import seed_streams, streams_kept
from adl_dist.training.trial.comparison import (
    FIRST,
    SECOND,
    Comparison,
    Difference,
    Key,
    describe_first_difference,
    record_calls,
)
from adl_dist.training.trial.samples import NUM_SAMPLES, Samples
from adl_dist.training.trial.stage_run import StageRun, TrialResult, crossing_acts, forward_error
from adl_dist.transport.spec import Specs, TensorSpec

SHARED = (
    "two stages share something in Python that a forward or backward changes, like a class attribute, a closure or a "
    "list, and each stage changes it alone; pass such a value from module to module, cut elsewhere "
    "(partition.balance), or use num_stages=1; partition.verify=false would train this other model"
)
OVERTAKES = (
    "with several micro-batches in flight a forward overwrites what the backward of an earlier one needs, or a weight "
    "is kept as a view or a detached copy that no new version reaches; write to a copy and use the parameter itself, "
    "or choose method=bp, with one micro-batch in flight"
)
REPEATS = (
    "a backward computes with its weights again, as activation checkpointing does, but method.weights=latest has no "
    "weights of the forward; use method.weights=stash, or no checkpointing"
)


class Trial:
    """Copies of a model and of its stages, and the samples to run them on.

    Attributes:
        device: where they run; the CPU if the device of the run has no room for them.
        model: a copy of the model in its dtype and memory format, which no run changes.
        samples: the samples, on that device.
        note: what the user should know of it; None before anything was compared.
    """

    def __init__(self, model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> None:
        """Copy ``model``, which stays as it is.

        Raises:
            ConfigError: If autocast is asked for, which does nothing on meta, and the model is there.
            PartitionError: If the model cannot be copied.
        """
        self.spec, self._given, self._all_samples = spec, model, samples
        self.is_lazy = any(p.is_meta for p in model.parameters())
        if self.is_lazy and spec.precision.autocast is not None:
            raise ConfigError(
                "runtime.autocast changes what travels between stages, and that is not known of a model on meta; build "
                "the model with its weights (runtime.meta_init=false), or use no autocast"
            )
        self.note = (
            None
            if not self.is_lazy
            else (
                "each process makes or reads the weights of its own stages only; shapes and calls were recorded, and "
                "values were not compared with the uncut model's, since no process holds all weights"
            )
        )
        num_bytes = sum(tensor.nbytes for tensor in model.parameters())
        has_room = device.type != "cuda" or 3 * num_bytes < torch.cuda.mem_get_info(device)[0]
        self._use(device if has_room else torch.device("cpu"))

    def _use(self, device: torch.device) -> None:
        self.device, channels_last = device, bool(self.spec.precision.channels_last)
        place = torch.device("meta") if self.is_lazy else device
        self.model = self.spec.precision.place(_copy(self._given), place)
        self.samples = self._all_samples.to(device, channels_last=channels_last)

    def chain(self, *, granularity: str, keeps_ties: str | None) -> Chain:
        """Record the model on the samples.

        Raises:
            ConfigError: If its forward fails.
            PartitionError: If its forward cannot be run in stages.
        """
        batches = [batch for pair in self.samples.readings for batch in pair]
        try:
            with (
                _uncompiled(),
                self.spec.precision.autocasting(self.device)(),
                warnings.catch_warnings(action="ignore"),
            ):
                return Chain(self.model, batches, granularity=granularity, keeps_ties=keeps_ties)
        except (AdlError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's own forward can raise anything
            self._uncut().run(self.samples, backward=False)
            given = ", ".join(str(TensorSpec.of(t)) for t in tensors_of(self.samples.one[0]))
            raise forward_error(f"the model gets {given}", error, training=True) from error

    def run(self, chain: Chain | None = None, sizes: Sequence[int] = (), *, verify: bool = False) -> TrialResult:
        """Run the stages, or the model itself, and return facts about them.

        With ``verify`` they are compared with the uncut model.

        Raises:
            ConfigError: If a stage or the loss does not take what it gets, or there is nothing to train.
            CutImpossibleError: If the model cannot be cut there.
            PartitionError: If the stages compute something else than the uncut model.
        """
        try:
            return self._run(chain, sizes, verify=verify)
        except torch.OutOfMemoryError:
            if self.device.type == "cpu":
                raise
            torch.cuda.empty_cache()
            self._use(torch.device("cpu"))
            return self._run(chain, sizes, verify=verify)

    def _run(self, chain: Chain | None, sizes: Sequence[int], *, verify: bool) -> TrialResult:
        start = time.perf_counter()
        with _uncompiled(), streams_kept(self.device):
            seed_streams(stream_seed(self.spec.seed, "trial"), self.device)
            plan = None if chain is None else chain.plan(sizes)
            if chain is None or plan is None:
                run = StageRun([_copy(self.model)], self.spec, self.device)
                run.run(self.samples, backward=self.samples.trains)
                result = run.result(self.samples)
            elif self.is_lazy:
                result = self._run_recorded(plan)
            else:
                cut = partial(self._cut, chain, plan, sizes)
                run = cut()
                if verify:
                    self._compare(run, cut, partial(self._uncut_as, chain, run))
                    seconds = f"{time.perf_counter() - start:.2f} s"
                    self.note = f"the stages were found equal to the uncut model on {NUM_SAMPLES} samples in {seconds}"
                else:
                    run.run(self.samples)
                result = run.result(self.samples)
            result = result._replace(single_fault=self._single_fault())
        if self.samples.trains:
            check_trains(result, self.samples)
        return result

    def _run_recorded(self, plan: StagePlan) -> TrialResult:
        """Return recorded facts about a meta model; try the loss on noise."""
        run = self._uncut()
        run.run(self.samples, backward=False)
        result = run.result(self.samples)
        acts, infos = dict(result.acts), {0: replace(result.infos[0], inputs=None)}
        for k in range(1, plan.num_stages):
            seen = [crossing_acts(plan.modes[training], k - 1) for training in (True, False)]
            needs = seen[0].needs_grad[0]
            acts[k] = Specs(*(one.specs() for one in seen)).getting_gradients(needs)
            infos[k] = replace(infos[0], needs_grad=needs, gets_grad=needs, keeps_memory=((), ()))
        return result._replace(acts=acts, infos=link_stages(infos))

    def _cut(self, chain: Chain, plan: StagePlan, sizes: Sequence[int]) -> StageRun:
        return StageRun(chain.stages(_copy(self.model), plan, sizes, range(len(sizes))), self.spec, self.device)

    def _uncut(self) -> StageRun:
        return StageRun([_copy(self.model)], self.spec, self.device, "the model")

    def _uncut_as(self, chain: Chain, cut: StageRun) -> StageRun:
        """Return the uncut model, or one stage if stages share random streams."""
        model: nn.Module = _copy(self.model)
        if any(isinstance(stage, StageModule) and stage.draws[0] for stage in cut.stages):
            whole = [len(chain.units)]
            (model,) = chain.stages(model, chain.plan(whole), whole, [0])
        return StageRun([model], self.spec, self.device, name="the uncut model")

    def _compare(self, run: StageRun, cut: Callable[[], StageRun], uncut: Callable[[], StageRun]) -> None:
        """Compare the stages with the uncut model, as in training.

        Raises:
            PartitionError: If they differ; names the first unit that does.
        """
        pipeline, weights = self.spec.pipeline, self.spec.pipeline.method.weights
        is_delayed = pipeline.overlaps or weights == "2bw"
        between: set[str] = set()
        for k, stage in enumerate(run.stages):
            if weights == "2bw" or (pipeline.delays[k] and not pipeline.spec.flush and weights != "recompute"):
                check_versions(stage, f"stage {k} ({describe_units(stage)})")
                between |= {name for name, p in stage.named_parameters() if p.requires_grad and takes_gradient(p)}
        names = frozenset(between)
        difference, cause = self._difference(run, uncut(), names, delayed=is_delayed), SHARED
        if difference is not None and is_delayed:
            # A backward that writes, like that of BatchNorm computed again, writes later if it is delayed.
            in_place = self._difference(cut(), uncut(), names, delayed=False)
            if in_place is None and difference.when in (FIRST, SECOND):
                cause = REPEATS if weights == "latest" else OVERTAKES
            else:
                difference = in_place
        if difference is not None:
            is_of_forward = cause is SHARED and difference.what in ("output", "loss")
            where = self._where(cut(), uncut(), names) if is_of_forward else ""
            raise PartitionError(
                f"the stages do not compute as the uncut model: {difference}{where}; likely cause: {cause}"
            )

    def _difference(self, cut: StageRun, uncut: StageRun, names: frozenset[str], *, delayed: bool) -> Difference | None:
        found: dict[Key, torch.Tensor | None] = {}
        cut.run(
            self.samples,
            lambda when, what, values: found.update({(when, what, name): value for name, value in values.items()}),
            between=names,
            delayed=delayed,
        )
        comparison = Comparison(self.spec, found)
        uncut.run(self.samples, comparison.take, between=names)
        return comparison.first_difference()

    def _where(self, cut: StageRun, uncut: StageRun, names: frozenset[str]) -> str:
        """Return a clause that names the first different module."""
        with ExitStack() as stack:
            found, expected = (stack.enter_context(record_calls(run.modules)) for run in (cut, uncut))
            for run in (cut, uncut):
                run.run(self.samples, between=names)
            return describe_first_difference(expected, found)

    def _single_fault(self) -> str | None:
        """Return why the model cannot be trained on one sample, or None."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of a size that may never come
                self._uncut().forward(self.samples.repeated(1), "one sample")
        except (ConfigError, PartitionError) as error:
            return str(error)
        return None


def _uncompiled() -> AbstractContextManager[Any]:
    """Run modules that the user has compiled as Python, without their compiler."""
    if "torch._dynamo" not in sys.modules:  # which takes a second to import, and compiling imports it
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with the hooks of its parameters."""
    twin = copied_model(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        if parameter._backward_hooks is not None:
            other._backward_hooks = parameter._backward_hooks
        if parameter._post_accumulate_grad_hooks is not None:
            other._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return twin


def memory_formats(model: nn.Module, spec: TrainSpec, samples: Samples) -> list[bool]:
    """Return the values of channels_last to try in turn.

    A model that fails with channels_last may run in the plain format.
    """
    if spec.precision.channels_last is not None:
        return [spec.precision.channels_last]
    has_images = any(tensor.ndim == 4 for tensor in (*tensors_of(samples.one[0]), *model.parameters()))
    return [True, False] if has_images else [True]


def check_trains(result: TrialResult, samples: Samples) -> None:
    """Raise ConfigError if the loss cannot train the model on ``samples``."""
    if result.loss_fault is not None:
        raise ConfigError(result.loss_fault)
    if not result.learns:
        raise ConfigError(
            "there is nothing to train: the loss depends on no parameter that takes a gradient; expected one with "
            "requires_grad=True, and an output that is not detached from it; to evaluate only, use Trainer.evaluate "
            "(adl-dist evaluate)"
        )
    if 1 in samples.sizes[0] and result.single_fault is not None:
        raise ConfigError(
            f"a micro-batch of the training data holds 1 sample, and {result.single_fault}; choose another "
            "train.batch_size, so that none does, also not the last of an epoch"
        )
