"""The cut model: which units are on which stage, and which stages are in this process."""

import hashlib
import json
import logging
import platform
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.checkpoint.state import signature
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition import Chain, Machine, checked_sizes, even_sizes, linearise
from adl_dist.partition.costs import Profile
from adl_dist.partition.imbalance import why_uneven
from adl_dist.partition.measure import measure
from adl_dist.partition.predict import best_cut, unevenness
from adl_dist.stage import TrainSpec
from adl_dist.training.input import DeviceLoader
from adl_dist.training.options import PartitionSpec
from adl_dist.training.shape_inference import SIZES, read
from adl_dist.transport.spec import TensorSpec

PROFILE = "profile.json"
NUM_SAMPLED = 4  # elements of a tensor by which ranks compare their initial weights
SHARE_OF_MEMORY = 0.9  # the rest is for what operations need while they run, and for fragments

logger = logging.getLogger("adl_dist")


class PartitionedModel:
    """A model and its cut, made at once, or, if units are to be measured, before the first step.

    Attributes:
        spec: where to cut.
        signature: names and shapes of all parameters and buffers of the uncut model.
        modules: the parts of the model that this process holds, by stage; the whole model until it is cut.
        sizes: units of each stage; None: not cut yet.
        summary: a measured cut in one line, on the rank that measured; else empty.
        warning: why the cut leaves most of the work to one stage, where that is known; else None.
        initial: samples of the weights that training begins with, see :func:`sampled`; empty: those of a checkpoint.
    """

    def __init__(self, model: nn.Module, num_stages: int, spec: PartitionSpec, *, own: Iterable[int]) -> None:
        """Read ``model`` as a chain of units, and cut it unless that takes a measurement; this process keeps ``own``.

        Raises:
            ConfigError: the speeds do not fit K.
            PartitionError: the model cannot be cut like that.
        """
        self._num_stages, self._own, self.spec = num_stages, list(own), spec
        speeds, balance = spec.speeds, spec.balance
        if speeds is not None and (len(speeds) != num_stages or min(speeds) <= 0):
            raise ConfigError(f"partition.speeds={list(speeds)} must be {num_stages} numbers above 0, one per stage")
        self.signature, self.initial = signature(model), sampled(model)
        self._model: nn.Module | None = model
        self._chain: Chain | None = None
        self.modules: dict[int, nn.Module] = dict.fromkeys(self._own, model)
        self.sizes: list[int] | None = None
        self.summary, self.warning = "", None
        self._home: dict[str, tuple[int, torch.dtype]] = {}
        if num_stages == 1 and isinstance(balance, str):
            self._cut([1])
            return
        self._chain = linearise(model, granularity=spec.units)
        if isinstance(balance, str):
            sizes = even_sizes(self._chain, num_stages)  # also before a measurement: shows that it can be cut at all
        else:
            sizes = checked_sizes(self._chain, num_stages, balance)
        if balance == "even":  # nothing is measured; but units may be had in few places only
            reasons = [self._chain.forbidden.get(unit, "") for unit in range(len(self._chain.units))]
            if any(reasons):
                self.warning = why_uneven(self._chain.units, reasons, sizes, sizes, of="the units")
        if balance != "auto":
            self._cut(sizes)

    def full_state_dict(self, *, distributed: bool) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model, on the CPU; if ``distributed``, every rank must call it."""
        if self._model is not None:
            return {name: _plain(tensor) for name, tensor in self._model.state_dict().items()}
        own = {k: module.state_dict() for k, module in self.modules.items()}
        full: dict[str, Tensor] = {}
        for name, (stage, dtype) in self._home.items():
            tensor = _plain(own[stage][name]) if stage in own else torch.empty(self.signature[name], dtype=dtype)
            if distributed:
                dist.broadcast(tensor, src=stage)
            full[name] = tensor
        return {name: full[name] for name in self.signature}

    def finalize(
        self,
        store: dist.Store,
        spec: TrainSpec,
        *,
        sample: tuple[Tensor, Tensor] | None,
        feed: DeviceLoader | None,
        micro_batch_size: int,
        folder: Path | None,
    ) -> None:
        """Cut where it is best for what is measured now, or was in ``folder`` before; the same on every rank.

        The process of stage 0, which alone has a ``sample`` and its source, ``feed``, measures with micro-batches of
        ``micro_batch_size``, and keeps the measurement in ``folder`` if there is one.

        Raises:
            PartitionError: no cut is possible, or none fits into memory.
            StageFailed, ChannelError: the rank that measures did not come to an end.
        """
        if self.sizes is not None:
            return
        assert self._model is not None
        assert self._chain is not None
        if sample is None or feed is None:
            self._cut(read(store, SIZES, 0)["sizes"])
            return
        device = sample[0].device
        profile = take_profile(
            spec.precision.place(self._model, device),
            self._chain,
            spec,
            granularity=self.spec.units,
            sample=sample,
            micro_batch_size=micro_batch_size,
            kept_in=folder / PROFILE if folder is not None else None,
            feed=feed,
        )
        machine = Machine(speeds=self.spec.speeds, memory_bytes=device_memory(device))
        balance = best_cut(profile, spec.pipeline, machine=machine)
        store.set(SIZES, json.dumps({"sizes": balance.sizes}))
        shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in balance.stage_seconds)
        firsts = ", ".join(self._chain.units[stop] for stop in accumulate(balance.sizes[:-1]))
        begins = f"the next begins at {firsts}"
        self.summary = f"measured cut: {balance.sizes} units per stage, {begins}; {shown} ms per micro-batch"
        logger.info(self.summary)
        self.warning = unevenness(profile.units, balance)
        self._cut(balance.sizes)

    def _cut(self, sizes: list[int]) -> None:
        assert self._model is not None
        pieces = [self._model] if self._num_stages == 1 else self._chain.pieces(sizes)  # type: ignore[union-attr]
        self.sizes = sizes
        self._home = {name: (k, t.dtype) for k, piece in enumerate(pieces) for name, t in piece.state_dict().items()}
        if missing := self.signature.keys() - self._home.keys():
            raise PartitionError(f"no stage holds {', '.join(sorted(missing)[:3])}; use partition.num_stages=1")
        self.modules = {k: pieces[k] for k in self._own}
        self._model = self._chain = None  # of K processes each keeps only its own stage


def take_profile(
    model: nn.Module,
    chain: Chain,
    spec: TrainSpec,
    *,
    granularity: str,
    sample: tuple[Tensor, Tensor],
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
    device, precision = sample[0].device, spec.precision
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    digest = json.dumps([chain.units, shapes, repr(model), repr(spec.loss_fn)])
    of = {  # what a measurement that was kept is recognised by
        "units": len(chain.units),
        "granularity": granularity,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": hashlib.sha256(digest.encode()).hexdigest()[:16],
        "optimizer": type(spec.optimizer([nn.Parameter(torch.zeros(1))])).__name__,
        **precision.settings,
        "micro_batch_size": micro_batch_size,
        "input": list(sample[0].shape[1:]),
        "channels_last": TensorSpec.of(sample[0]).channels_last,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
    if kept_in is not None and kept_in.is_file():
        kept = Profile.load(kept_in)
        if kept.of == of:
            return kept
    input_, target = micro_batch(sample, micro_batch_size, device)
    profile = measure(
        model,
        chain,
        input_=input_,
        target=target,
        loss_fn=spec.loss_fn,
        optimizer=spec.optimizer,
        of=of,
        within=precision.autocasting(device),
        wire_dtype=precision.wire_dtype,
    )
    if feed is not None:
        profile = replace(profile, loading=feed.seconds_to_load(micro_batch_size))
    if kept_in is not None:
        profile.save(kept_in)
    return profile


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that stages may fill; None for the CPU, whose memory all processes share."""
    return int(torch.cuda.mem_get_info(device)[1] * SHARE_OF_MEMORY) if device.type == "cuda" else None


def micro_batch(sample: tuple[Tensor, Tensor], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return input [size, ...] and target [size, ...] of one sample, repeated."""
    input_, target = (TensorSpec.of(tensor).empty(size, device).copy_(tensor) for tensor in sample)
    return input_, target


def sampled(model: nn.Module) -> dict[str, list[float]]:
    """Return a few elements of each parameter and buffer: enough to tell other random weights, at no price."""
    samples = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // NUM_SAMPLED)][:NUM_SAMPLED].cpu()
            some = some.abs() if some.is_complex() else some
            samples[name] = torch.nan_to_num(some.double()).tolist()
    return samples


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()
