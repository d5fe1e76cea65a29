"""Timing of a model's calls, one by one, on the training device."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from adl_dist.batch import Batch, call, copy_batch, device_of
from adl_dist.partition.captured import Capture, Within, first_units, now, times_of, unit_costs
from adl_dist.partition.chain import Chain, copied_model
from adl_dist.partition.costs import Profile
from adl_dist.streams import streams_kept

WARMUP = 2  # rounds; the second is the first to add to gradients that are there
FEWEST, MOST = 3, 30  # rounds after these
GPU_WARMUP_SECONDS = 1.0  # and as many more rounds as fit: a GPU that rested runs at a fraction of its clock
SECONDS = 6.0  # beyond the fewest no round is started after so long

Figures = TypeVar("Figures")
LossFn = Callable[[Any, Any], Tensor]


def measure(  # 9: the model and its units, a sample, how it is trained, and the name of the measurement
    model: nn.Module,
    chain: Chain,
    *,
    input_: Batch,
    target: Batch,
    loss_fn: LossFn,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    of: dict[str, Any],
    within: Within = nullcontext,
) -> Profile:
    """Time copies of the model: its calls one by one, and the whole model.

    Args:
        model: the uncut model, on its device.
        chain: its units. Cuts that turn out to be impossible are added to ``chain.forbidden``.
        input_: the inputs of a micro-batch, [B, ...].
        target: its targets, [B, ...].
        loss_fn: the mean loss of an output and ``target``, counted to the last unit.
        optimizer: makes an optimizer of the parameters that it is given.
        of: the identity of the measurement, as in :class:`Profile`.
        within: makes the context of forward and loss.

    Returns:
        The profile, with the times of each unit and of the whole model.
    """
    # Before anything else: more tensors in memory would make its allocations cheaper than in training.
    forward, backward = pace(model, input_, target, loss_fn, within)
    twin = copied_model(model).train()
    with streams_kept(device_of(input_)), torch.enable_grad():
        capture = Capture(twin, chain, within)
        capture.run(input_, lambda output: loss_fn(output, copy_batch(target)))
        units = unit_costs(twin, chain, capture, input_)
        rounds = _repeated(partial(times_of, capture.calls, len(units), within, device_of(input_)), device_of(input_))
        updates, copies = _updates(twin, chain, optimizer, device_of(input_))
    # The least: a unit is short, so what is slower was interrupted. Of the whole the mean: training is interrupted.
    forwards, backwards = (map(min, zip(*times, strict=True)) for times in zip(*rounds, strict=True))
    units = [
        replace(unit, forward=f, backward=b, **vars(update))
        for unit, f, b, update in zip(units, forwards, backwards, updates, strict=True)
    ]
    return Profile(of=of, units=units, forward=forward, backward=backward, optimizer_copies=copies)


def pace(
    model: nn.Module, input_: Batch, target: Batch, loss_fn: LossFn, within: Within = nullcontext
) -> tuple[float, float]:
    """Return the mean (forward, backward) seconds of a copy of ``model``."""
    twin = copied_model(model).train()

    def once() -> tuple[float, float]:
        given, wanted = copy_batch(input_), copy_batch(target)  # model and loss may write to them
        start = now(device_of(input_))
        with within():
            loss = loss_fn(call(twin, given), wanted)
        middle = now(device_of(input_))
        loss.backward()
        return middle - start, now(device_of(input_)) - middle

    with streams_kept(device_of(input_)), torch.enable_grad():
        forwards, backwards = zip(*_repeated(once, device_of(input_)), strict=True)
    return statistics.fmean(forwards), statistics.fmean(backwards)


def _repeated(measured: Callable[[], Figures], device: torch.device) -> list[Figures]:
    """Return results of ``measured``, repeated after rounds of warm-up."""
    warm = time.perf_counter() + (GPU_WARMUP_SECONDS if device.type == "cuda" else 0.0)
    for _ in range(WARMUP):
        measured()
    while time.perf_counter() < warm:
        measured()
    figures: list[Figures] = []
    start = time.perf_counter()
    while len(figures) < FEWEST or (len(figures) < MOST and time.perf_counter() - start < SECONDS):
        figures.append(measured())
    return figures


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The seconds of a unit at the end of a group, as in :class:`UnitCost`."""

    update: float = 0.0
    update_fixed: float = 0.0
    copy: float = 0.0


def _updates(
    model: nn.Module,
    chain: Chain,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
) -> tuple[list[_Update], float]:
    """Return (each unit's seconds at the end of a group, optimizer bytes).

    The bytes are per byte of parameters. At the end of a group the norm is computed, the optimizer steps, and gradients
    are cleared. Each unit is measured, because rules differ: Muon takes long for a matrix, and AdamW a moment for an
    embedding. The time of the smallest parameter is the fixed part: on a GPU nearly all of it may be launches, which
    are as many for a small stage as for the whole model.
    """
    owned: list[list[nn.Parameter]] = [[] for _ in chain.units]
    firsts = first_units(model, chain)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owned[firsts[name]].append(parameter)
    parameters = [p for of_unit in owned for p in of_unit]
    if not (num_bytes := sum(p.nbytes for p in parameters)):
        return [_Update() for _ in owned], 0.0
    made = optimizer(parameters)
    whole = statistics.median(_seconds_of_update(made, parameters, device))
    state = sum(t.nbytes for kept in made.state.values() for t in kept.values() if isinstance(t, Tensor))
    del made  # what it remembers takes as much memory as the copies below
    copy = _seconds_of_copy(parameters, device) / num_bytes
    smallest = min(parameters, key=lambda parameter: parameter.nbytes)
    fixed = min(whole, *_seconds_of_update(optimizer([smallest]), [smallest], device))
    sizes = [sum(p.nbytes for p in of_unit) for of_unit in owned]
    # The least, as of forward and backward. At least a little: of units that are as small, times may not tell.
    alone = [
        min(_seconds_of_update(optimizer(of_unit), of_unit, device)) if size else fixed
        for of_unit, size in zip(owned, sizes, strict=True)
    ]
    little = [(whole - fixed) * size / num_bytes / 10 for size in sizes]
    parts = [max(seconds - fixed, least) for seconds, least in zip(alone, little, strict=True)]
    scale = (whole - fixed) / sum(parts) if whole > fixed else 0.0
    return [
        _Update(update=part * scale, update_fixed=fixed, copy=size * copy) if size else _Update()
        for part, size in zip(parts, sizes, strict=True)
    ], state / num_bytes


def _seconds_of_copy(parameters: Sequence[nn.Parameter], device: torch.device) -> float:
    """Return the seconds to copy ``parameters`` while an older copy is held."""
    seconds, held = [], list[list[Tensor]]()
    for _ in range(4):
        start = now(device)
        held.append([parameter.detach().clone() for parameter in parameters])
        seconds.append(now(device) - start)
        del held[:-1]
    return statistics.median(seconds[1:])


def _seconds_of_update(made: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> list[float]:
    """Return the seconds of 4 updates, after one that creates optimizer state."""
    seconds = []
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)  # not zeros, whose pages need not be there
        start = now(device)
        get_total_norm([p.grad for p in parameters if p.grad is not None])
        made.step()
        made.zero_grad()
        seconds.append(now(device) - start)
    return seconds[1:]
