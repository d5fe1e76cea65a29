"""The trial at the start: runs of the stages, compared with the model."""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from adl_dist.schedule import Method
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import describe_units, link_stages, takes_gradient
from adl_dist.stage.loss import ReturnsSumError, SumCountLoss
from adl_dist.stage.versions import check_versions
from adl_dist.streams import seed_streams, streams_kept
from adl_dist.training.trial.differences import (
    Difference,
    describe_first_difference,
    first_difference,
    record_calls,
)
from adl_dist.training.trial.samples import NUM_SAMPLES, Samples
from adl_dist.training.trial.stage_run import (
    FIRST,
    SECOND,
    StageRun,
    TrialResult,
    exhaust,
    forward_error,
    recorded_crossings,
    specs_of,
)
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
        device: where the copies run; the CPU if the device of the run has no room for them.
        model: a copy of the model in its dtype and memory format, which no run changes.
        samples: the samples, on this device.
        note: a note on the comparison for the user; None before there was one.
    """

    def __init__(self, model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> None:
        """Copy ``model``, which stays as it is.

        Raises:
            ConfigError: If autocast is set for a model on meta, where it does nothing.
            PartitionError: If the model cannot be copied.
        """
        self.spec, self._given, self._all_samples, self.note = spec, model, samples, None
        self.is_lazy = any(p.is_meta for p in model.parameters())
        if self.is_lazy:
            if spec.precision.autocast is not None:
                raise ConfigError(
                    "runtime.autocast changes what travels between stages, and that is not known of a model on meta; "
                    "build the model with its weights (runtime.meta_init=false), or use no autocast"
                )
            self.note = (
                "each process makes or reads the weights of its own stages only; shapes and calls were recorded, and "
                "values were not compared with the uncut model's, since no process holds all weights"
            )
        num_bytes = sum(tensor.nbytes for tensor in model.parameters())
        has_room = device.type != "cuda" or 3 * num_bytes < torch.cuda.mem_get_info(device)[0]
        self._use(device if has_room else torch.device("cpu"))

    def _use(self, device: torch.device) -> None:
        self.device, channels_last = device, bool(self.spec.precision.channels_last)
        place = torch.device("meta") if self.is_lazy else device
        self.model = self.spec.precision.place(_copy(self._given), place)
        self.samples = self._all_samples.to(device, channels_last=channels_last)

    def chain(self, *, granularity: str) -> Chain:
        """Record the model on the samples.

        Raises:
            ConfigError: If its forward fails.
            PartitionError: If its forward cannot be run in stages.
        """
        keeps = keeps_ties(self.spec.pipeline.method)
        batches = [batch for pair in self.samples.readings for batch in pair]
        try:
            # Recorded as in training, or buffers that many units read would be on one stage.
            with (
                _uncompiled(),
                self.spec.precision.autocasting(self.device)(),
                warnings.catch_warnings(action="ignore"),
            ):
                return Chain(self.model, batches, granularity=granularity, keeps_ties=keeps)
        except (AdlError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's own forward can raise anything
            failed = error
        exhaust(self._uncut().run(self.samples, backward=False))
        given = ", ".join(str(TensorSpec.of(t)) for t in tensors_of(self.samples.one[0]))
        raise forward_error(f"the model gets {given}", failed, training=True) from failed

    def run(self, chain: Chain | None = None, sizes: Sequence[int] = (), *, verify: bool = False) -> TrialResult:
        """Run the stages, or the model itself, and return facts about them.

        With ``verify`` they are compared with the uncut model.

        Raises:
            ConfigError: If a stage or the loss does not accept its input, or there is nothing to train.
            CutImpossibleError: If the model cannot be cut there.
            PartitionError: If the stages compute other values than the uncut model.
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
            if chain is None or plan is None or self.is_lazy:
                run = self._uncut("" if plan is None else "the model")
                exhaust(run.run(self.samples, backward=self.samples.trains and plan is None))
            elif verify:
                run = self._compared(chain, plan, sizes)
                seconds = f"{time.perf_counter() - start:.2f} s"
                self.note = f"the stages were found equal to the uncut model on {NUM_SAMPLES} samples in {seconds}"
            else:
                run = self._cut(chain, plan, sizes)
                exhaust(run.run(self.samples))
            result = run.result(self.samples)
            if plan is not None and self.is_lazy:
                result = _with_recorded(result, plan)
            result = result._replace(single_fault=self._single_fault())
        if self.samples.trains:
            check_trains(result, self.samples)
        return result

    def _cut(self, chain: Chain, plan: StagePlan, sizes: Sequence[int]) -> StageRun:
        return StageRun(chain.stages(_copy(self.model), plan, sizes, range(len(sizes))), self.spec, self.device)

    def _uncut(self, name: str = "the model") -> StageRun:
        return StageRun([_copy(self.model)], self.spec, self.device, name)

    def _compared(self, chain: Chain, plan: StagePlan, sizes: Sequence[int]) -> StageRun:
        """Return the stages' run, compared with the uncut model as in training.

        Raises:
            PartitionError: If they differ; the text names the first difference.
        """
        pipeline, weights, between = self.spec.pipeline, self.spec.pipeline.method.weights, set[str]()
        run, whole = self._cut(chain, plan, sizes), [len(chain.units)]
        for k, stage in enumerate(run.stages):
            if weights == "2bw" or (pipeline.delays[k] and not pipeline.spec.flush and weights != "recompute"):
                check_versions(stage, f"stage {k} ({describe_units(stage)})")
                between |= {name for name, p in stage.named_parameters() if p.requires_grad and takes_gradient(p)}
        # One stage in place of the uncut model, if stages share random streams.
        is_stage = any(isinstance(stage, StageModule) and stage.draws[0] for stage in run.stages)
        if is_stage:
            uncut = partial(self._cut, chain, chain.plan(whole), whole)
        else:
            uncut = partial(self._uncut, "the uncut model")

        def compare(cut: StageRun, *, delayed: bool) -> Difference | None:
            expected = uncut().run(self.samples, between=between)
            return first_difference(self.spec, expected, cut.run(self.samples, between=between, delayed=delayed))

        is_delayed = pipeline.overlaps or weights == "2bw"
        difference, cause = compare(run, delayed=is_delayed), SHARED
        if difference is not None and is_delayed:
            # A backward that writes, like that of BatchNorm computed again, writes later if it is delayed.
            other = self._cut(chain, plan, sizes)
            in_place = compare(other, delayed=False)
            if in_place is None and difference.when in (FIRST, SECOND):
                cause = REPEATS if weights == "latest" else OVERTAKES
            else:
                run, difference = other, in_place
        if difference is None:
            return run
        where = ""
        if cause is SHARED and difference.what in ("output", "loss"):
            with ExitStack() as stack:
                runs = [self._cut(chain, plan, sizes), uncut()]
                found, expected = (stack.enter_context(record_calls(one.modules)) for one in runs)
                for one in runs:
                    exhaust(one.run(self.samples, between=between))
                where = describe_first_difference(expected, found)
        raise PartitionError(
            f"the stages do not compute as the uncut model: {difference}{where}; likely cause: {cause}"
        )

    def _single_fault(self) -> str | None:
        """Return why the model cannot be trained on one sample, or None."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of a size that may never come
                self._uncut().forward(self.samples.repeated(1), "one sample")
        except (ConfigError, PartitionError) as error:
            return str(error)
        return None


def _with_recorded(result: TrialResult, plan: StagePlan) -> TrialResult:
    """Return the ``result`` of a meta model with recorded facts of its stages."""
    acts, infos = dict(result.acts), {0: replace(result.infos[0], inputs=None)}
    for k in range(1, plan.num_stages):
        modes = [recorded_crossings(plan.modes[training], k - 1) for training in (True, False)]
        needs = modes[0][0].needs_grad
        specs = Specs(*(specs_of([(one.size, one.acts) for one in seen]) for seen in modes))
        acts[k] = specs.getting_gradients(needs)
        infos[k] = replace(infos[0], needs_grad=needs, gets_grad=needs, keeps_memory=((), ()))
    return result._replace(acts=acts, infos=link_stages(infos))


def _uncompiled() -> AbstractContextManager[Any]:
    """Run the user's compiled modules in the block without the compiler."""
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


def keeps_ties(method: Method) -> str | None:
    """Return why tied weights must be on one stage, or None."""
    why = method.why_not_tied
    return None if why is None else f"since {why}: use partition.tied=untie"


def attempts(model: nn.Module, spec: TrainSpec, samples: Samples) -> Iterator[AbstractContextManager[TrainSpec]]:
    """Yield contexts with a spec to try, until one succeeds or the last fails.

    A model that fails with channels_last is tried in the plain memory format. A loss that returns (sum, count) is
    recognised when it is called; it is then tried as their quotient.
    """
    has_images = any(tensor.ndim == 4 for tensor in (*tensors_of(samples.one[0]), *model.parameters()))
    given, is_done = spec.precision.channels_last, False
    formats = [given] if given is not None else [True, False] if has_images else [True]
    left = [replace(spec, precision=replace(spec.precision, channels_last=channels_last)) for channels_last in formats]

    @contextmanager
    def attempt(tried: TrainSpec) -> Iterator[TrainSpec]:
        nonlocal is_done
        try:
            yield tried
            is_done = True
        except ReturnsSumError as pair:
            left.insert(0, replace(tried, loss_fn=SumCountLoss(tried.loss_fn, pair.target, pair.count)))
        except (ConfigError, PartitionError):
            if not left:
                raise

    while left and not is_done:
        yield attempt(left.pop(0))


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
