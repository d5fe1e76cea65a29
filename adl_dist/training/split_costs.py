"""The part of each unit's backward that a split can put off: seconds, and the bytes that it holds until then."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from adl_dist.batch import Batch, call
from adl_dist.partition import Chain
from adl_dist.partition.costs import UnitCost
from adl_dist.partition.measure import LossFn, Within, now, restored
from adl_dist.stage.deferred import DeferredGradients

ROUNDS = 4  # the first is not counted


def with_split_costs(
    units: Sequence[UnitCost],
    model: nn.Module,
    chain: Chain,
    *,
    input_: Batch,
    target: Batch,
    loss_fn: LossFn,
    within: Within,
) -> list[UnitCost]:
    """Return the costs of the ``units`` of ``chain`` with what a split can put off of each; ``model`` is as before.

    ``loss_fn`` (output, ``target`` [B, ...]) is the mean loss; ``within`` makes the context of the forward.
    """
    pieces = chain.pieces([1] * len(chain.units))
    unit_of = {id(p): unit for unit, piece in reversed([*enumerate(pieces)]) for p in piece.parameters()}
    deferred = DeferredGradients(model)
    rounds: list[dict[int, float]] = []
    held: dict[int, int] = {}
    with restored(model, input_), torch.enable_grad():
        model.train()
        for _ in range(ROUNDS if deferred.names else 0):
            seconds: dict[int, float] = defaultdict(float)
            storages: dict[int, dict[int, int]] = defaultdict(dict)
            with deferred.ready(), within():
                loss = loss_fn(call(model, input_), target)
            assert loss.grad_fn is not None, "the model has parameters that are trained"
            with deferred.put_off([loss.grad_fn]) as later:
                loss.backward()
            for one in [*later]:
                unit = unit_of[id(one.layer.module.weight)]
                for kept in (one.x.untyped_storage(), one.grad.untyped_storage()):
                    storages[unit][kept.data_ptr()] = kept.nbytes()
                start = now(input_.device)
                deferred.compute([one])
                seconds[unit] += now(input_.device) - start
            rounds.append(seconds)
            held = {unit: sum(sizes.values()) for unit, sizes in storages.items()}
    return [
        replace(
            unit,
            backward_weight=min((times.get(place, 0.0) for times in rounds[1:]), default=0.0),
            deferred_bytes=held.get(place, 0),
        )
        for place, unit in enumerate(units)
    ]
