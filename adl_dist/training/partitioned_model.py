"""The cut model: which units are on which stage, and which stages are in this process."""

import gc
import hashlib
import json
import logging
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.batch import Batch, Several, layout_of, mapped, tensors_of
from adl_dist.checkpoint.nested import is_extra_state
from adl_dist.checkpoint.state import signature
from adl_dist.codecs import PLAIN
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.links import LINKS, Links, parse_links
from adl_dist.partition import Chain, Machine, check_same_chain, checked_sizes, even_sizes, linearise
from adl_dist.partition.chain import has_layer_list, has_plain_units
from adl_dist.partition.costs import Profile
from adl_dist.partition.imbalance import why_uneven
from adl_dist.partition.measure import measure
from adl_dist.partition.predict import best_cut, unevenness, with_delays
from adl_dist.schedule import Method, Pipeline
from adl_dist.stage import TrainSpec
from adl_dist.stage.optimizer import stage_optimizer
from adl_dist.training.agreement import SIZES, read, sampled
from adl_dist.training.delays import recorded_delays
from adl_dist.training.flops import flops_per_sample, peak_tflops
from adl_dist.training.input import DeviceLoader
from adl_dist.training.lazy_weights import LazyWeights
from adl_dist.training.options import PartitionSpec
from adl_dist.training.split_costs import with_split_costs
from adl_dist.training.tied_copies import TiedCopies, copied
from adl_dist.training.trial.findings import Agreed, CutImpossible
from adl_dist.training.trial.known_values import KnownValues
from adl_dist.training.trial.meta_trial import MetaTrial
from adl_dist.training.trial.samples import NUM_SAMPLES, Samples
from adl_dist.training.trial.snapshot import restored_after
from adl_dist.training.trial.trial import Trial, check_trains, in_a_memory_format
from adl_dist.transport.coding_speed import coding_costs
from adl_dist.transport.spec import TensorSpec

PROFILE = "profile.json"
SHARE_OF_MEMORY = 0.9  # the rest is for what operations need while they run, and for fragments

logger = logging.getLogger("adl_dist")


class Measuring(NamedTuple):
    """What units are measured with."""

    feed: DeviceLoader  # what stage 0 loads micro-batches from
    micro_batch_size: int
    folder: Path | None  # that keeps the measurement
    stages_on_device: int = 1  # that share the device of each process
    links: Links | None = None  # between stages; None: they take no time


class Settled(NamedTuple):
    """What was settled at the start."""

    spec: TrainSpec  # with the memory format
    agreed: Agreed
    samples: Samples
    trained: frozenset[str]  # parameters of this process's stages that took a gradient then

    def holds_for(self, samples: Samples) -> bool:
        """Return whether it was found with samples like these."""
        alike = [
            [(layout_of(of), len(tensors_of(of)), *map(TensorSpec.of, tensors_of(of))) for of in one.pair[0]]
            for one in (self.samples, samples)
        ]
        return alike[0] == alike[1] and self.samples.varies == samples.varies


class PartitionedModel:
    """A model and its cut, made before the first step, when there are samples to try it out with.

    Attributes:
        spec: where to cut.
        signature: names and shapes of all parameters and buffers of the uncut model.
        modules: the parts of the model that this process holds, by stage; the whole model until it is cut.
        sizes: units of each stage; None: not cut yet.
        warning: why the cut leaves most of the work to one stage, where that is known; else None.
        initial: samples of the weights that training begins with; empty: those of a checkpoint.
        ties: the weights of which several stages hold a copy; none before it is cut.
        notes: what the user should know of the cut, a line each.
        verify_seconds: how long the comparison with the uncut model took; None: there was none.
        weights: what makes the tensors of this process's stages, if the model is on meta; else None.
        flops: of forward and backward of a sample, as a share of a device's peak in a second; None: not known.
    """

    def __init__(
        self,
        model: nn.Module,
        num_stages: int,
        spec: PartitionSpec,
        *,
        own: Iterable[int],
        weights: LazyWeights | None = None,
    ) -> None:
        """Take ``model``, to be cut into ``num_stages``, of which this process keeps ``own``.

        ``weights``: what makes its tensors, if it is on meta.

        Raises:
            ConfigError: the speeds or links do not fit K, or a model on meta cannot be cut as it is asked for.
            PartitionError: there are too few units, as far as that is known without reading the forward.
        """
        self._num_stages, self._own, self.spec = num_stages, list(own), spec
        speeds = spec.speeds
        if speeds is not None and (len(speeds) != num_stages or min(speeds) <= 0):
            raise ConfigError(f"partition.speeds={list(speeds)} must be {num_stages} numbers above 0, one per stage")
        if spec.links is not None and spec.links != "auto":
            parse_links(spec.links, LINKS).for_stages(num_stages, LINKS)
        self.weights = weights
        if weights is not None:
            check_lazy(model, spec)
        if type(model) is nn.Sequential and spec.units == "block" and num_stages > 1:
            check_counts(model, num_stages, spec.balance)
        self.signature = signature(model)
        of_stream = {"stream of the weights": weights.stream} if weights is not None else None
        state = model.state_dict()
        self.initial = of_stream or sampled((name, state[name]) for name in self.signature)
        self._model: nn.Module | None = model
        self.modules: dict[int, nn.Module] = dict.fromkeys(self._own, model)
        self.sizes: list[int] | None = None
        self.ties = TiedCopies()
        self.notes: list[str] = []
        self.warning: str | None = None
        self.verify_seconds: float | None = None
        self.flops: float | None = None
        self.peak_tflops: float | None = None  # of a device, if that is given
        self._settled: Settled | None = None
        self._home: dict[str, tuple[int, torch.dtype | None]] = {}

    def full_state_dict(self, *, distributed: bool) -> dict[str, Any]:
        """Return parameters and buffers of the whole model, on the CPU; if ``distributed``, every rank must call it.

        Extra state of modules is that of this process's stages.
        """
        if self._model is not None and self.weights is not None:
            raise ConfigError("the model is on torch.device('meta') until fit or evaluate has made each process's part")
        if self._model is not None:
            return {name: _plain(tensor) for name, tensor in self._model.state_dict().items()}
        own = {k: module.state_dict() for k, module in self.modules.items()}
        if self._num_stages == 1:  # its modules may be others than at the start
            return {name: _plain(tensor) for name, tensor in own[0].items()}
        full: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, (stage, dtype) in self._home.items():
            if dtype is None:  # extra state, which no message carries
                extra |= {name: own[stage][name]} if stage in own else {}
                continue
            tensor = _plain(own[stage][name]) if stage in own else torch.empty(self.signature[name], dtype=dtype)
            if distributed:
                dist.broadcast(tensor, src=stage % dist.get_world_size())
            full[name] = tensor
        return {name: full[name] for name in self.signature} | extra

    def finalize(
        self,
        store: dist.Store,
        spec: TrainSpec,
        samples: Samples,
        *,
        device: torch.device,
        measuring: Measuring | None,
    ) -> Settled:
        """Cut the model, try it out with ``samples`` and compare it with the uncut one; the same on every rank.

        The process of stage 0, which alone has ``measuring``, measures if that is asked for.

        Raises:
            ConfigError: a part of the model or the loss does not take what it gets, or there is nothing to train.
            PartitionError: the model cannot be cut like that, no cut fits into memory, or the cut one is another.
            StageFailed, ChannelError: the rank that measures did not come to an end.
        """
        if self._settled is not None:
            return self._again(samples, device)
        assert self._model is not None
        settle = partial(self._settle, store, samples, device, measuring)
        # A library's own forward asks for values, of masks and positions, also on meta.
        asks = self.weights is not None and has_layer_list(self._model)
        with _collector_off(), KnownValues() if asks else nullcontext():
            (spec, agreed, sizes, stages), is_plain = in_a_memory_format(self._model, spec, samples, settle)
        self._cut(sizes, stages)
        if isinstance(spec.loss_fn, nn.Module):  # the trial may have taken it to the CPU, where there was more room
            spec.loss_fn.to(device)
        if self.ties.stages:
            spec = replace(spec, pipeline=replace(spec.pipeline, tied=self.ties.stages))
        if self.weights is not None:
            for module in self.modules.values():
                self.weights.make(module)
            self.weights = None
        settled = Settled(spec, agreed, samples, self._trained())
        if is_plain:
            self._note("channels_last is off: the model runs in the plain memory format only")
        self._settled = settled
        return settled

    def _settle(
        self,
        store: dist.Store,
        samples: Samples,
        device: torch.device,
        measuring: Measuring | None,
        spec: TrainSpec,
    ) -> tuple[TrainSpec, Agreed, list[int], list[nn.Module]]:
        """Return the spec, findings, sizes and stages that are settled in the memory format of ``spec``."""
        assert self._model is not None
        make_trial = Trial if self.weights is None else MetaTrial
        trial = make_trial(self._model, spec, samples, device)
        chain = None
        if self._num_stages > 1 or not isinstance(self.spec.balance, str):
            with spec.precision.autocasting(trial.device)():
                lengths, units, keeps = trial.readings, self.spec.units, keeps_ties(spec.pipeline.method)
                chain = linearise(
                    self._model, granularity=units, samples=lengths[0], varies=samples.varies, keeps_ties=keeps
                )
                for of_length in lengths[1:]:
                    check_same_chain(chain, self._model, of_length, granularity=units)
        if chain is None or self._num_stages == 1:
            if chain is not None:
                checked_sizes(chain, 1, self.spec.balance)
            sizes, stages = [1], [self._model]
            agreed, delays = trial.run(stages, verify=self.spec.verify), spec.pipeline.nominal_delays
        else:
            sizes, stages, agreed, delays = self._choose(trial, chain, store, measuring)
        if spec.pipeline.method.awaits_delays:
            spec = replace(spec, pipeline=Pipeline(spec.pipeline.method.with_delays(delays), self._num_stages))
        self.verify_seconds = trial.verify_seconds
        if self.weights is not None:
            self._note_lazy()
        elif self.verify_seconds is not None and self._num_stages > 1:
            self._note(
                f"the cut model was found equal to the uncut one on {NUM_SAMPLES} samples in "
                f"{self.verify_seconds:.2f} s"
            )
        peak = peak_tflops(self.peak_tflops, spec, device)
        if peak is not None and measuring is not None and self.weights is None and agreed.learns:
            flops = flops_per_sample(self._model, spec, samples.to(trial.device, channels_last=False), trial.device)
            self.flops = None if flops is None else flops / (1e12 * peak)
        return spec, agreed, sizes, stages

    def _note_lazy(self) -> None:
        """Say what a model on meta was compared by."""
        compared = "the operations of the cut model were not compared with the uncut one's (partition.verify=false)"
        if self.verify_seconds is not None:
            compared = (
                f"the cut model was found to do the same operations as the uncut one in {self.verify_seconds:.2f} s; "
                "values were not compared, since no process holds all weights"
            )
        self._note(f"each process makes or reads the weights of its own stages only; {compared}")

    def _choose(
        self, trial: Trial | MetaTrial, chain: Chain, store: dist.Store, measuring: Measuring | None
    ) -> tuple[list[int], list[nn.Module], Agreed, tuple[int, ...]]:
        """Return sizes, stages, findings and nominal delays of the cut that was asked for, or can be made."""
        balance = self.spec.balance
        verify = self.spec.verify and balance != "auto"
        while True:
            explicit = not isinstance(balance, str)
            sizes = checked_sizes(chain, self._num_stages, balance) if explicit else even_sizes(chain, self._num_stages)
            stages = chain.pieces(sizes)
            try:
                agreed = trial.run(stages, verify=verify, is_final=balance != "auto")
                break
            except CutImpossible as error:
                if explicit:
                    raise
                chain.forbidden.setdefault(sum(sizes[: error.stage + 1]) - 1, error.reason)
        if balance == "even":  # nothing is measured; but units may be had in few places only
            reasons = [chain.forbidden.get(unit, "") for unit in range(len(chain.units))]
            if any(reasons):
                self.warning = why_uneven(chain.units, reasons, sizes, sizes, of="the units")
        if balance != "auto":
            begins = ", ".join(chain.units[stop] for stop in accumulate(sizes[:-1]))
            self._note(f"cut: {list(sizes)} units per stage, the next begins at {begins}")
            return sizes, stages, agreed, trial.spec.pipeline.nominal_delays
        key = SIZES[bool(trial.spec.precision.channels_last)]
        if measuring is None:
            found = read(store, key, 0)
            sizes, delays = found["sizes"], tuple(found["delays"])
        else:
            sizes, delays = self._measured(trial, chain, measuring)
            store.set(key, json.dumps({"sizes": sizes, "delays": delays}))
        stages = chain.pieces(sizes)
        return sizes, stages, trial.run(stages, verify=self.spec.verify), delays

    def _measured(
        self, trial: Trial | MetaTrial, chain: Chain, measuring: Measuring
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the sizes and nominal delays that are best for what is measured now, or was before."""
        assert self._model is not None
        assert isinstance(trial, Trial)
        with restored_after(self._model, [], trial.spec, trial.device):
            profile = take_profile(
                self._model,
                chain,
                trial.spec,
                granularity=self.spec.units,
                sample=trial.one,
                micro_batch_size=measuring.micro_batch_size,
                kept_in=measuring.folder / PROFILE if measuring.folder is not None else None,
                feed=measuring.feed,
            )
        codecs, kept_in = trial.spec.precision.codecs, measuring.folder
        if codecs != PLAIN and not profile.coding:
            profile = replace(profile, coding=coding_costs(trial.device))
            if kept_in is not None:  # the same command is to make the same cut
                profile.save(kept_in / PROFILE)
        machine = Machine(
            speeds=self.spec.speeds,
            memory_bytes=device_memory(trial.device, measuring.stages_on_device),
            codecs=codecs,
            coding=profile.coding,
            **({} if measuring.links is None else measuring.links.figures),
        )
        if measuring.links is not None:
            self._note(f"links between stages: {measuring.links}")
        pipeline = self._with_delays(profile, trial.spec.pipeline, machine, measuring.folder)
        while True:
            units = [replace(u, may_cut=u.may_cut and n not in chain.forbidden) for n, u in enumerate(profile.units)]
            balance = best_cut(replace(profile, units=units), pipeline, machine=machine)
            try:
                trial.run(chain.pieces(balance.sizes), is_final=False)
                break
            except CutImpossible as error:
                chain.forbidden.setdefault(sum(balance.sizes[: error.stage + 1]) - 1, error.reason)
        shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in balance.stage_seconds)
        begins = ", ".join(chain.units[stop] for stop in accumulate(balance.sizes[:-1]))
        self._note(
            f"measured cut: {balance.sizes} units per stage, the next begins at {begins}; {shown} ms per micro-batch"
        )
        self.warning = unevenness(units, balance)
        return balance.sizes, pipeline.nominal_delays

    def _with_delays(self, profile: Profile, pipeline: Pipeline, machine: Machine, folder: Path | None) -> Pipeline:
        """Return ``pipeline`` with the delays that its run began with, or else with those that are best now.

        Values depend on delays, so a run keeps them, whatever is measured when it continues.
        """
        if not pipeline.method.awaits_delays:
            return pipeline
        delays = recorded_delays(folder, self._num_stages) if folder is not None else None
        if delays is not None:
            self._note(f"delays of this run: {delays} micro-batches")
            return Pipeline(pipeline.method.with_delays(delays), self._num_stages)
        measured = with_delays(profile, pipeline, machine=machine)
        delays, longest = list(measured.nominal_delays), pipeline.method.longest_delay(self._num_stages)
        why = "the least that keep all stages at work"
        if delays[0] == longest:
            stale = longest / pipeline.micro_batches_per_update
            why = f"the best with a staleness of at most {stale:g} updates (method.max_staleness)"
        self._note(f"measured delays: {delays} micro-batches, {why}")
        return measured

    def _again(self, samples: Samples, device: torch.device) -> Settled:
        """Return what was settled before the first call of fit or evaluate, if it holds for these samples, too.

        Raises:
            ConfigError: it does not, and this process does not hold the whole model any more; a parameter that was
                frozen then is trained now.
        """
        assert self._settled is not None
        settled = self._settled
        if self._num_stages > 1 and (unlike := self._trained() - settled.trained):
            raise ConfigError(
                f"'{min(unlike)}' takes a gradient now, but did not when the model was cut, and stages agreed then on "
                "the gradients that they send; make a new Trainer, of a model with the weights of full_state_dict()"
            )
        is_new = samples.trains and not settled.samples.trains and self._num_stages == 1  # no backward was looked at
        if is_new or not settled.holds_for(samples):
            if isinstance(samples.one[1], Several) is not isinstance(settled.samples.one[1], Several):
                raise ConfigError(
                    "the targets of this call are one tensor, and were several in the first call, or the other way "
                    "round, and the loss was wrapped for those; make a new Trainer for these"
                )
            if len(self._own) < self._num_stages:
                raise ConfigError(
                    "the samples of this call have another shape or dtype than those that the model was cut with; make "
                    "a new Trainer for them"
                )
            stages = [self.modules[k] for k in range(self._num_stages)]
            trial = Trial(nn.ModuleList(stages), settled.spec, samples, device)
            agreed = trial.run(stages, is_final=False)
            # What was found before holds for any samples.
            before = settled.agreed.traits
            traits = {k: replace(found, recomputes=before[k].recomputes) for k, found in agreed.traits.items()}
            settled = self._settled = settled._replace(agreed=agreed._replace(traits=traits), samples=samples)
        if samples.trains:
            check_trains(settled.agreed, samples)
        return settled

    def _trained(self) -> frozenset[str]:
        parts = self.modules.values()
        return frozenset(name for part in parts for name, p in part.named_parameters() if p.requires_grad)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        logger.info(text)

    def _cut(self, sizes: list[int], pieces: Sequence[nn.Module]) -> None:
        self.sizes = sizes
        self._home = {
            name: (k, None if is_extra_state(name) else value.dtype)
            for k, piece in enumerate(pieces)
            for name, value in piece.state_dict().items()
        }
        if missing := self.signature.keys() - self._home.keys():
            raise PartitionError(f"no stage holds {', '.join(sorted(missing)[:3])}; use partition.num_stages=1")
        assert self._model is not None
        if len(pieces) > 1:
            self.ties = copied(self._model, pieces)
            for note in self.ties.notes():
                self._note(note)
        self.modules = {k: pieces[k] for k in self._own}
        self._model = None  # of K processes each keeps only its own stage


def keeps_ties(method: Method) -> str | None:
    """Return why weights with several names must be on one stage with ``method``, in words; None: they need not."""
    why = method.why_not_tied
    return None if why is None else f"since {why}: use partition.tied=untie"


@contextmanager
def _collector_off() -> Iterator[None]:
    """Hold Python's collector back: it would look at all of torch's 400,000 objects, 0.1 s a time, and free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_counts(model: nn.Sequential, num_stages: int, balance: str | Sequence[int] | Sequence[str]) -> None:
    """Raise a PartitionError if the units of ``model``, its children, are too few, or not as many as asked for."""
    chain = linearise(model)
    chain.forbidden.clear()  # what cannot be cut is known with samples
    if isinstance(balance, str):
        even_sizes(chain, num_stages)
    else:
        checked_sizes(chain, num_stages, balance)


def check_lazy(model: nn.Module, spec: PartitionSpec) -> None:
    """Raise ConfigError if ``model``, which is on meta, cannot be cut by ``spec``."""
    way_out = "or build the model with its weights (runtime.lazy=false)"
    if spec.balance == "auto":
        raise ConfigError(
            "partition.balance=auto measures units with their weights, but the model is on torch.device('meta'); use "
            f"even, or the list that adl-dist plan prints, {way_out}"
        )
    if (spec.units != "block" or not has_plain_units(model)) and not has_layer_list(model):
        raise ConfigError(
            f"a {type(model).__name__} at partition.granularity={spec.units} is read by running it, but it is on "
            "torch.device('meta'); expected an nn.Sequential of units, without hooks, at partition.granularity=block, "
            f"or a model with a layer_list, {way_out}"
        )


def take_profile(
    model: nn.Module,
    chain: Chain,
    spec: TrainSpec,
    *,
    granularity: str,
    sample: tuple[Batch, Batch],
    micro_batch_size: int,
    kept_in: Path | None,
    feed: DeviceLoader | None,
) -> Profile:
    """Measure the cost of each unit of ``model``, or read a measurement of the same thing.

    Its units are those of ``chain``; it is on the device of the ``sample``: input [1, ...] and target [1, ...], which
    are repeated to a micro-batch. ``kept_in`` is the file of the measurement. ``feed`` is what stage 0 loads
    micro-batches from; None: it loads none.

    Raises:
        PartitionError: that file is not a profile.
    """
    device, precision, inputs = sample[0].device, spec.precision, tensors_of(sample[0])
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    digest = json.dumps([chain.units, shapes, repr(model), repr(spec.loss_fn)])
    of = {  # what a measurement that was kept is recognised by
        "units": len(chain.units),
        "granularity": granularity,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": hashlib.sha256(digest.encode()).hexdigest()[:16],
        "optimizer": type(stage_optimizer(spec.optimizer, trained, where="the model")).__name__,
        **{key: value for key, value in precision.settings.items() if "codec" not in key},  # what it spares is measured
        "micro_batch_size": micro_batch_size,
        "input": list(inputs[0].shape[1:]) if len(inputs) == 1 else [list(tensor.shape[1:]) for tensor in inputs],
        "channels_last": TensorSpec.of(inputs[0]).channels_last,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "splits": True,  # what is deferred by a split is measured, too
        "codecs": True,  # and what codecs spare
        "updates": True,  # and the update of each unit
    }
    if kept_in is not None and kept_in.is_file():
        kept = Profile.load(kept_in, of)
        if kept is not None:
            return kept
    input_, target = micro_batch(sample, micro_batch_size, device)
    how: dict[str, Any] = {"input_": input_, "target": target, "loss_fn": spec.loss_fn}
    how["within"] = precision.autocasting(device)
    profile = measure(
        model,
        chain,
        optimizer=spec.optimizer,
        of=of,
        **how,
    )
    profile = with_split_costs(profile, model, chain, **how)
    if feed is not None:
        profile = replace(profile, loading=feed.seconds_to_load(micro_batch_size))
    if kept_in is not None:
        profile.save(kept_in)
    return profile


def device_memory(device: torch.device, num_stages: int = 1) -> int | None:
    """Return the bytes of a GPU that each of ``num_stages`` on it may fill; None for the CPU, which all share."""
    return int(torch.cuda.mem_get_info(device)[1] * SHARE_OF_MEMORY) // num_stages if device.type == "cuda" else None


def micro_batch(sample: tuple[Batch, Batch], size: int, device: torch.device) -> tuple[Batch, Batch]:
    """Return input [size, ...] and target [size, ...] of one sample, repeated."""

    def repeated(tensor: Tensor) -> Tensor:
        return TensorSpec.of(tensor).empty(size, device).copy_(tensor)

    return mapped(sample[0], repeated), mapped(sample[1], repeated)


def _plain(tensor: Any) -> Any:
    """Return a copy of ``tensor`` on the CPU; extra state as it is."""
    return tensor if not isinstance(tensor, Tensor) else tensor.detach().cpu().contiguous().clone()
