"""Measurements for a cut: costs of units, links, delays, operations.

Profile, links and delays are kept in the run folder.
"""

import hashlib
import json
import platform
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from adl_dist.batch import Batch, call, copy_batch, device_of, map_batch, move_batch, num_samples, tensors_of
from adl_dist.distributed.world import World
from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, Links, parse_links
from adl_dist.partition import Chain
from adl_dist.partition.captured import Within, first_units, now
from adl_dist.partition.chain import copied_model
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import measure
from adl_dist.report.files import write_atomically
from adl_dist.stage import LossFn, TrainSpec
from adl_dist.stage.deferred import DeferredGradients
from adl_dist.stage.optimizer import stage_optimizer
from adl_dist.streams import streams_kept
from adl_dist.training.input import DeviceLoader
from adl_dist.training.startup_sync import Agreement
from adl_dist.training.trial.samples import Samples
from adl_dist.transport.link_speed import measure_links
from adl_dist.transport.spec import TensorSpec

PROFILE_FILE, LINKS_FILE, DELAYS_FILE = "profile.json", "links.json", "delays.json"
SHARE_OF_MEMORY = 0.9  # of a GPU; the rest is for what operations need while they run, and for fragments
FREE = 1e15, 0.0  # bytes per second and seconds of one way within a process

ROUNDS = 8  # the first is not counted
# Dense, of bfloat16 with sums in float32, in 1e12 operations per second, as the maker's data sheets say.
PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}

T = TypeVar("T")


def take_profile(
    model: nn.Module,
    chain: Chain,
    spec: TrainSpec,
    sample: tuple[Batch, Batch],
    *,
    micro_batch_size: int,
    kept_in: Path | None,
    feed: DeviceLoader | None,
) -> Profile:
    """Measure the cost of each unit of ``chain``, or read an earlier profile.

    The ``sample``, input [1, ...] and target [1, ...], is repeated to a micro-batch, on its device. ``kept_in`` is the
    file of the measurement. ``feed`` is the source of stage 0's micro-batches, or None.

    Raises:
        PartitionError: If the file ``kept_in`` is not a profile.
    """
    of = _profile_key(model, chain, spec, sample, micro_batch_size)
    profile = Profile.load(kept_in, of) if kept_in is not None and kept_in.is_file() else None
    if profile is None:
        input_, target = micro_batch(sample, micro_batch_size)
        within = spec.precision.autocasting(device_of(input_))
        how: dict[str, Any] = {"input_": input_, "target": target, "loss_fn": spec.loss_fn, "within": within}
        profile = measure(model, chain, optimizer=spec.optimizer, of=of, **how)
        profile = with_split_costs(profile, model, chain, **how)
        if feed is not None:
            profile = replace(profile, loading=feed.seconds_to_load(micro_batch_size))
        if kept_in is not None:
            profile.save(kept_in)
    return profile


def _profile_key(
    model: nn.Module, chain: Chain, spec: TrainSpec, sample: tuple[Batch, Batch], micro_batch_size: int
) -> dict[str, Any]:
    """Return the values that must be equal for a measurement to be used again."""
    inputs, device = tensors_of(sample[0]), device_of(sample[0])
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    digest = json.dumps([chain.units, shapes, repr(model), repr(spec.loss_fn)])
    return {
        "units": len(chain.units),
        "granularity": chain.granularity,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": hashlib.sha256(digest.encode()).hexdigest()[:16],
        "optimizer": type(stage_optimizer(spec.optimizer, trained, where="the model")).__name__,
        **{key: value for key, value in spec.precision.settings.items() if "codec" not in key},
        "micro_batch_size": micro_batch_size,
        "input": list(inputs[0].shape[1:]) if len(inputs) == 1 else [list(tensor.shape[1:]) for tensor in inputs],
        "unit": unit_of_inputs(inputs[0]),
        "channels_last": bool(TensorSpec.of(inputs[0]).order),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        **dict.fromkeys(("splits", "codecs", "updates"), True),  # measured as well
    }


def unit_of_inputs(inputs: Tensor) -> str:
    """Return the unit of ``inputs``: images, sequences or samples."""
    if inputs.is_floating_point():
        return "images" if inputs.ndim == 4 else "samples"
    return "sequences" if inputs.ndim == 2 else "samples"


def device_memory(device: torch.device, num_stages: int = 1) -> int | None:
    """Return the usable GPU memory of one stage in bytes, or None on a CPU."""
    return int(torch.cuda.mem_get_info(device)[1] * SHARE_OF_MEMORY) // num_stages if device.type == "cuda" else None


def micro_batch(sample: tuple[Batch, Batch], size: int) -> tuple[Batch, Batch]:
    """Repeat a sample on its device as (input, target), each [size, ...]."""
    device = device_of(sample[0])

    def repeated(tensor: Tensor) -> Tensor:
        return TensorSpec.of(tensor).empty(size, device).copy_(tensor)

    return map_batch(repeated, sample[0]), map_batch(repeated, sample[1])


class _Round(NamedTuple):
    """The seconds of one forward and backward, split and whole."""

    deferrable: dict[int, float]  # of each unit, the part that can be deferred
    held: dict[int, int]  # bytes that each unit holds until then
    split: float
    whole: float


def with_split_costs(
    profile: Profile,
    model: nn.Module,
    chain: Chain,
    *,
    input_: Batch,
    target: Batch,
    loss_fn: LossFn,
    within: Within,
) -> Profile:
    """Return ``profile`` with the measured costs of a split backward.

    ``profile`` comes from :func:`measure`; ``model`` is the uncut model, and ``input_`` a micro-batch with its
    ``target`` [B, ...]; ``within`` makes the context of the forward.
    """
    twin = copied_model(model).train()
    firsts = first_units(twin, chain)
    unit_of = {id(p): firsts[name] for name, p in twin.named_parameters()}
    deferred = DeferredGradients(twin)
    if not deferred.names:
        return profile

    def loss() -> Tensor:
        with within():
            return loss_fn(call(twin, copy_batch(input_)), copy_batch(target))  # they may write to them

    with streams_kept(device_of(input_)), torch.enable_grad():
        rounds = [_one_round(deferred, loss, unit_of, device_of(input_)) for _ in range(ROUNDS)][1:]
    units = [
        replace(
            unit,
            backward_weight=min(one.deferrable.get(place, 0.0) for one in rounds),
            deferred_bytes=rounds[-1].held.get(place, 0),
        )
        for place, unit in enumerate(profile.units)
    ]
    slowdown = min(one.split for one in rounds) / min(one.whole for one in rounds)
    return replace(profile, units=units, split_slowdown=max(1.0, slowdown))


def _one_round(
    deferred: DeferredGradients, loss: Callable[[], Tensor], unit_of: Mapping[int, int], device: torch.device
) -> _Round:
    deferrable: dict[int, float] = defaultdict(float)
    storages: dict[int, dict[int, int]] = defaultdict(dict)
    start = now(device)
    with deferred.ready():
        root = loss()
    assert root.grad_fn is not None, "the model has parameters that are trained"
    with deferred.deferrable([root.grad_fn]) as later:
        root.backward()
    first_part = now(device) - start
    for one in [*later]:
        unit = unit_of[id(one.layer.module.weight)]
        for kept in (one.x.untyped_storage(), one.grad.untyped_storage()):
            storages[unit][kept.data_ptr()] = kept.nbytes()
        start = now(device)
        deferred.compute([one])
        deferrable[unit] += now(device) - start
    start = now(device)
    loss().backward()
    whole = now(device) - start
    held = {unit: sum(sizes.values()) for unit, sizes in storages.items()}
    return _Round(deferrable, held, first_part + sum(deferrable.values()), whole)


def peak_tflops(given: float | None, spec: TrainSpec, device: torch.device) -> float | None:
    """Return the ``given`` or known peak of a device in TFLOPS, or None."""
    if given is not None or device.type != "cuda" or spec.precision.autocast is not torch.bfloat16:
        return given
    name = torch.cuda.get_device_name(device)
    # What follows a hyphen is form and memory; a space begins the name of another device.
    if " MIG " in name:  # a part of one
        return None
    return next((peak for known, peak in PEAK_TFLOPS.items() if name == known or name.startswith(f"{known}-")), None)


def flops_per_sample(model: nn.Module, spec: TrainSpec, samples: Samples, device: torch.device) -> float | None:
    """Count the operations of forward and backward of one sample.

    Counted are matrix products, convolutions and attention. Return None if lengths change, or if the model has none of
    these. The mode, buffers and gradients of ``model`` change.
    """
    if samples.varies:
        return None
    batch = samples.pair[1]
    with streams_kept(device), FlopCounterMode(display=False) as counter, torch.enable_grad():
        model.train()
        target = move_batch(batch.target, device)
        with spec.precision.autocasting(device)():
            out = call(model, copy_batch(batch.input_))  # it may write to it
            spec.loss_fn(out, copy_batch(target)).backward()
    return counter.get_total_flops() / num_samples(batch.input_) or None


def links_between(links: str | None, world: World, agreement: Agreement, folder: Path | None) -> Links | None:
    """Return the links for the cut and delays, or None.

    ``links`` describes them. If it is ``auto``, rank 0 returns the links recorded in ``folder`` for as many stages in
    as many processes, or those measured now; all ranks take part, and the others return None. All return None for one
    stage, and for ``auto`` in a single process.
    """
    K = world.num_stages
    if links is None or K == 1:
        return None
    if links != "auto":
        return parse_links(links, LINKS).for_stages(K, LINKS)
    if not world.is_distributed:
        return None
    after = ChainMap(*agreement.all(measure_links(world.edges, world.rank, world.device)))
    if world.rank != 0:
        return None
    key = f"{K} stages in {world.size} processes"
    kept = (None if folder is None else _read(folder / LINKS_FILE, _rates_by_key)) or {}
    if key not in kept:
        kept[key] = [after.get(str(k), FREE) for k in range(K - 1)]  # within one process there is nothing to measure
        if folder is not None:
            _write(folder / LINKS_FILE, kept)
    return Links(*(tuple(column) for column in zip(*kept[key], strict=True)))


def read_delays(folder: Path, num_stages: int) -> list[int] | None:
    """Return the delays recorded for ``num_stages``, or None."""
    delays = _read(folder / DELAYS_FILE, lambda content: [int(delay) for delay in content])
    return delays if delays is not None and len(delays) == num_stages else None


def record_delays(folder: Path, delays: Sequence[int]) -> None:
    """Record the delays of the run in ``folder``.

    Raises:
        ConfigError: If the run has begun with other delays, which this trainer did not know.
    """
    recorded = read_delays(folder, len(delays))
    if recorded is None:
        _write(folder / DELAYS_FILE, list(delays))
    elif recorded != list(delays):
        raise ConfigError(
            f"run_dir={folder} has the delays {recorded}, but this trainer has settled on {list(delays)} before; make "
            "a new Trainer for it"
        )


def _rates_by_key(content: Any) -> dict[str, list[tuple[float, float]]]:
    """Return lists of (bytes per second, seconds) of links, by key."""
    return {key: [(float(rate), float(wait)) for rate, wait in links] for key, links in content.items()}


def _read(path: Path, convert: Callable[[Any], T]) -> T | None:
    """Return the content of ``path``, or None; ConfigError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return convert(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to measure again") from error


def _write(path: Path, content: object) -> None:
    with write_atomically(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
