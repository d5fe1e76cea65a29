"""What a split backward does to a model: what of each unit it can defer, and how much longer all of it takes."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adl_dist.batch import Batch, call
from adl_dist.partition import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import LossFn, Within, now, restored
from adl_dist.stage.deferred import DeferredGradients

ROUNDS = 8  # the first is not counted


class _Round(NamedTuple):
    """What one forward and backward took, in seconds, with a split backward and with a whole one."""

    deferrable: dict[int, float]  # of each unit, what can be deferred
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
    """Return the profile of ``chain`` with what a split does to it; ``model`` is as before.

    ``loss_fn`` (output, ``target`` [B, ...]) is the mean loss; ``within`` makes the context of the forward.
    """
    pieces = chain.pieces([1] * len(chain.units))
    unit_of = {id(p): unit for unit, piece in reversed([*enumerate(pieces)]) for p in piece.parameters()}
    deferred = DeferredGradients(model)
    if not deferred.names:
        return profile

    def loss() -> Tensor:
        with within():
            return loss_fn(call(model, input_.clone()), target.clone())  # they may write to them

    with restored(model, input_), torch.enable_grad():
        model.train()
        rounds = [_one_round(deferred, loss, unit_of, input_.device) for _ in range(ROUNDS)][1:]
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
