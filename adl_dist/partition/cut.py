"""Cuts a model into K stages without renaming a single parameter."""

import difflib
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.partition.balance import best_balance
from adl_dist.partition.chain import Chain, LayeredChain, linearise
from adl_dist.partition.costs import StageFootprint, UnitCost
from adl_dist.partition.imbalance import usual
from adl_dist.partition.ran import Samples
from adl_dist.partition.ties import KEPT


def cut(
    model: nn.Module,
    *,
    num_stages: int,
    balance: Sequence[int] | Sequence[str] | None = None,
    granularity: str = "block",
    samples: Samples | None = None,
    keeps_ties: str | None = KEPT,
) -> list[nn.Module]:
    """Cut ``model`` into stages that together hold exactly its parameters and buffers.

    The state_dict keys of the stages are those of the uncut model: their disjoint union is its state_dict.
    ``balance``: units of each stage, or the names of the units where stages 1..K-1 begin; None: as even as can be.
    ``granularity`` (what a unit is), ``samples`` and ``keeps_ties`` are those of :func:`linearise`.

    Raises:
        PartitionError: it cannot be traced, has too few units, or cannot be cut there.
    """
    if num_stages == 1 and balance is None:
        return [model]
    chain = linearise(model, granularity=granularity, samples=samples, keeps_ties=keeps_ties)
    sizes = even_sizes(chain, num_stages) if balance is None else checked_sizes(chain, num_stages, balance)
    return [model] if num_stages == 1 else chain.pieces(sizes)


def even_balance(num_units: int, num_stages: int, *, looks_inside: bool = True) -> list[int]:
    """Return the units of each stage, as equal as can be; the last stages take one more where it does not divide.

    ``looks_inside``: whether another granularity would have more units.

    Raises:
        PartitionError: there are more stages than units.
    """
    if num_stages > num_units:
        inside = ", or partition.granularity=layer, which looks inside blocks" if looks_inside else ""
        raise PartitionError(
            f"partition.num_stages={num_stages} needs at least {num_stages} units, but the model has {num_units}; "
            f"use at most partition.num_stages={max(num_units, 1)}{inside}"
        )
    few, extra = divmod(num_units, num_stages)
    return [few + (stage >= num_stages - extra) for stage in range(num_stages)]


def even_sizes(chain: Chain, num_stages: int) -> list[int]:
    """Return the units of each stage, as equal as can be where the chain can be cut; raise a PartitionError if not."""
    sizes = even_balance(len(chain.units), num_stages, looks_inside=not isinstance(chain, LayeredChain))
    if chain.forbidden.keys().isdisjoint(stop - 1 for stop in accumulate(sizes[:-1])):
        return sizes
    num_places = len(chain.units) - 1 - len(chain.forbidden)
    if num_places < num_stages - 1:
        reason = usual(chain.forbidden.values())
        unit = next(unit for unit, why in chain.forbidden.items() if why == reason)
        raise PartitionError(
            f"partition.num_stages={num_stages}: the model has {num_places} place(s) where it can be cut; expected "
            f"{num_stages - 1} or more, but after {chain.units[unit]}, for example, {reason}; use at most "
            f"partition.num_stages={num_places + 1}, or change what crosses there"
        )
    same = [
        UnitCost(name=name, forward=1.0, backward=0.0, may_cut=unit not in chain.forbidden)
        for unit, name in enumerate(chain.units)
    ]
    return best_balance(same, num_stages=num_stages, held=[StageFootprint(graphs=1)] * num_stages).sizes


def checked_sizes(chain: Chain, num_stages: int, balance: Sequence[int] | Sequence[str]) -> list[int]:
    """Return the units of each stage for a user's ``balance``, K numbers or the K-1 names where the next stage begins.

    Raises:
        PartitionError: it does not fit the chain, or asks for a cut that cannot be made.
    """
    units, num_units = chain.units, len(chain.units)
    if balance and all(isinstance(entry, str) for entry in balance):
        begins = [_unit_named(str(name), units) for name in balance]
        if len(begins) != num_stages - 1 or begins != sorted({*begins}) or 0 in begins:
            raise PartitionError(
                f"partition.balance=[{', '.join(map(str, balance))}] does not fit: expected {num_stages - 1} names, of "
                f"the units where stages 1 to {num_stages - 1} begin, in the order they run"
            )
        sizes = [stop - start for start, stop in pairwise([0, *begins, num_units])]
    else:
        sizes = [int(size) for size in balance]
    if len(sizes) != num_stages or sum(sizes) != num_units or min(sizes, default=0) < 1:
        some = ", ".join(units if num_units <= 12 else [*units[:6], "...", *units[-3:]])
        raise PartitionError(
            f"partition.balance={sizes} does not fit: expected {num_stages} numbers, each at least 1, that add up to "
            f"the model's {num_units} units ({some}), got {len(sizes)} that add up to {sum(sizes)}"
        )
    for stop in accumulate(sizes[:-1]):
        if stop - 1 in chain.forbidden:
            raise PartitionError(
                f"the model cannot be cut after {units[stop - 1]}: {chain.forbidden[stop - 1]}; choose another "
                "partition.balance; even and auto cut where it is possible"
            )
    return sizes


def _unit_named(name: str, units: Sequence[str]) -> int:
    """Return the unit called ``name``, or the first one of the block of that name."""
    for unit, known in enumerate(units):
        if known == name or known.startswith(f"{name}."):
            return unit
    blocks = [known[:end] for known in units for end in range(len(known)) if known[end] == "."]
    known_names = list(dict.fromkeys([*blocks, *units]))
    same_end = [known for known in known_names if known.endswith(f".{name}") or known.rpartition(".")[2] == name]
    close = [*same_end, *difflib.get_close_matches(name, known_names, n=3)] or units[:3]
    raise PartitionError(
        f"partition.balance: there is no unit or block '{name}'; near it are {', '.join(dict.fromkeys(close[:3]))}; "
        "adl-dist plan --units lists them all"
    )
