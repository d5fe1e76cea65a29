"""Which units of the model are on which stage, and which stages are in this process."""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.checkpoint.state import signature
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition import Chain, Machine, checked_sizes, even_sizes, linearise
from adl_dist.partition.measure import measure
from adl_dist.partition.predict import best_cut
from adl_dist.partition.profile import Profile
from adl_dist.schedule import Pipeline
from adl_dist.training import shape_inference
from adl_dist.training.input import DeviceLoader
from adl_dist.training.precision import Precision, to_channels_last

PROFILE = "profile.json"
SHARE_OF_MEMORY = 0.9  # the rest is for what operations need while they run, and for fragments

logger = logging.getLogger("adl_dist")


class PartitionedModel:
    """A model, and its cut once that is settled: at once, or, if it is to be measured, before the first step.

    Attributes:
        signature: names and shapes of all parameters and buffers of the uncut model.
        modules: the parts of the model that this process holds, by stage; the whole model until it is settled.
        sizes: units of each stage; None: not settled.
        told: what a measured cut came out as, on the rank that measured.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_stages: int,
        balance: str | Sequence[int] | Sequence[str] | None,
        granularity: str | None,
        speeds: Sequence[float] | None,
        own: Iterable[int],
    ) -> None:
        """Read ``model`` as a chain, and cut it unless that takes a measurement; see :class:`Trainer`."""
        self._num_stages, self._own, self._speeds = num_stages, list(own), speeds
        if speeds is not None and (len(speeds) != num_stages or min(speeds) <= 0):
            raise ConfigError(f"partition.speeds={list(speeds)} must be {num_stages} numbers above 0, one per stage")
        measured = balance == "auto"
        if speeds is not None and not measured:
            raise ConfigError("partition.speeds weighs a measured cut; it needs partition.balance=auto")
        by_name = isinstance(balance, list | tuple) and any(isinstance(entry, str) for entry in balance)
        self.granularity = granularity or ("layer" if measured or by_name else "block")
        self.signature = signature(model)
        self._model: nn.Module | None = model
        self._chain: Chain | None = None
        self.modules: dict[int, nn.Module] = dict.fromkeys(self._own, model)
        self.sizes: list[int] | None = None
        self.told = ""
        self._home: dict[str, tuple[int, torch.dtype]] = {}
        if num_stages > 1 or not (balance is None or isinstance(balance, str)):
            self._chain = linearise(model, granularity=self.granularity)
        if self._chain is None:
            self._settle([1])
        elif balance is None or balance == "even":
            self._settle(even_sizes(self._chain, num_stages))
        elif not isinstance(balance, str):
            self._settle(checked_sizes(self._chain, num_stages, balance))
        elif measured:
            even_sizes(self._chain, num_stages)  # shows that it can be cut at all
        else:
            raise ConfigError(f"partition.balance={balance} is none of auto, even, a list of numbers, a list of names")

    def full_state_dict(self, *, distributed: bool) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, on the CPU; if ``distributed``, every rank must call it."""
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

    def settle(
        self,
        store: dist.Store,
        *,
        pipeline: Pipeline,
        sample: tuple[Tensor, Tensor] | None,
        feed: DeviceLoader | None,
        micro_batch_size: int,
        loss_fn: Callable[[Any, Tensor], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        device: torch.device,
        precision: Precision,
        channels_last: bool,
        folder: Path | None,
    ) -> None:
        """Cut where it is best for what is measured now, or was in ``folder`` before; the same on every rank.

        Args:
            store: shared by all ranks.
            pipeline: the method to train by, and K.
            sample: input and target of one sample as the first stage gets them; on its process only, which measures.
            feed: where it comes from.
            micro_batch_size: to measure with.
            loss_fn: of the model.
            optimizer: makes an optimizer.
            device: of this process.
            precision: how it computes.
            channels_last: whether it stores images so.
            folder: keeps the measurement; None: nothing does.

        Raises:
            PartitionError: no cut is possible, or none fits into memory.
            StageFailed, ChannelError: the rank that measures did not come to an end.
        """
        if self.sizes is not None:
            return
        assert self._model is not None
        assert self._chain is not None
        if sample is None:
            self._settle(shape_inference.await_sizes(store))
            return
        self._model.to(device)
        if channels_last:
            to_channels_last(self._model)
        profile = take_profile(
            self._model,
            self._chain,
            granularity=self.granularity,
            sample=sample,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            optimizer=optimizer,
            device=device,
            precision=precision,
            kept_in=folder / PROFILE if folder is not None else None,
            load=None if feed is None else lambda: feed.seconds_to_load(micro_batch_size),
        )
        memory = device_memory(device)
        balance = best_cut(
            profile,
            pipeline,
            machine=Machine(speeds=self._speeds, memory_bytes=memory),
        )
        shape_inference.publish_sizes(store, balance.sizes)
        shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in balance.stage_seconds)
        self.told = f"measured cut: {balance.sizes} units per stage, {shown} ms per micro-batch"
        logger.info(self.told)
        self._settle(balance.sizes)

    def _settle(self, sizes: list[int]) -> None:
        assert self._model is not None
        pieces = [self._model] if self._num_stages == 1 else self._chain.pieces(sizes)  # type: ignore[union-attr]
        self.sizes = sizes
        self._home = {name: (k, t.dtype) for k, piece in enumerate(pieces) for name, t in piece.state_dict().items()}
        missing = self.signature.keys() - self._home.keys()
        if missing:
            raise PartitionError(f"no stage holds {', '.join(sorted(missing)[:3])}; use partition.num_stages=1")
        self.modules = {k: pieces[k] for k in self._own}
        self._model = self._chain = None  # of K processes each keeps only its own stage


def take_profile(
    model: nn.Module,
    chain: Chain,
    *,
    granularity: str,
    sample: tuple[Tensor, Tensor],
    micro_batch_size: int,
    loss_fn: Callable[[Any, Tensor], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
    precision: Precision,
    kept_in: Path | None,
    load: Callable[[], float] | None = None,
) -> Profile:
    """Measure what each unit of ``model``, which is on ``device``, costs; or read what was measured before.

    Args:
        model: of ``chain``.
        chain: its units.
        granularity: of the units.
        sample: input [1, ...] and target [1, ...]; repeated to a micro-batch.
        micro_batch_size: samples of one.
        loss_fn: of the model.
        optimizer: makes an optimizer.
        device: of the model.
        precision: how it computes.
        load: measures how long stage 0 loads a micro-batch; None: it does not.
        kept_in: a file; a measurement of the same thing that it holds is taken, another one is replaced.

    Raises:
        PartitionError: that file is no profile.
    """
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    told = json.dumps([chain.units, shapes, repr(model), repr(loss_fn)])
    of = {
        "units": len(chain.units),
        "granularity": granularity,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": hashlib.sha256(told.encode()).hexdigest()[:16],
        "optimizer": type(optimizer([nn.Parameter(torch.zeros(1))])).__name__,
        **precision.settings,
        "micro_batch_size": micro_batch_size,
        "input": list(sample[0].shape[1:]),
        "channels_last": sample[0].ndim == 4 and not sample[0].is_contiguous(),
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
        loss_fn=loss_fn,
        optimizer=optimizer,
        of=of,
        within=precision.autocasting(device),
        wire_dtype=precision.wire_dtype,
    )
    if load is not None:
        profile = replace(profile, loading=load())
    if kept_in is not None:
        profile.save(kept_in)
    return profile


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that stages may fill; None: of the CPU, whose memory all processes share."""
    return int(torch.cuda.mem_get_info(device)[1] * SHARE_OF_MEMORY) if device.type == "cuda" else None


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def micro_batch(sample: tuple[Tensor, Tensor], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input [size, ...] and target [size, ...] of one sample, repeated."""
    return _repeated(sample[0], size).to(device), _repeated(sample[1], size).to(device)


def _repeated(sample: Tensor, size: int) -> Tensor:
    channels_last = sample.ndim == 4 and not sample.is_contiguous()
    batch = sample.expand(size, *sample.shape[1:])
    return batch.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
