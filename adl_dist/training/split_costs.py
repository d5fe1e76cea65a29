"""Measurements of a split backward: deferrable parts and extra time."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adl_dist.batch import Batch, call, copy_batch, device_of
from adl_dist.partition.captured import Within, first_units, now
from adl_dist.partition.chain import Chain, copied_model
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import LossFn
from adl_dist.stage.deferred import DeferredGradients
from adl_dist.streams import streams_kept

ROUNDS = 8  # the first is not counted


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

    ``profile`` is that of :func:`measure`, ``model`` the uncut model, ``input_`` a micro-batch with its ``target``
    [B, ...]; ``within`` makes the context of the forward.
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
