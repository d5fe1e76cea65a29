"""Cuts a model into K stages without renaming a single parameter."""

from collections.abc import Sequence

from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.partition.balance import best_balance
from adl_dist.partition.chain import Chain, linearise, user_frame
from adl_dist.partition.costs import StageFootprint, UnitCost


def cut(
    model: nn.Module,
    *,
    num_stages: int,
    balance: Sequence[int] | Sequence[str] | None = None,
    granularity: str = "block",
) -> list[nn.Module]:
    """Cut ``model`` into stages that together hold exactly its parameters and buffers.

    The state_dict keys of the stages are those of the uncut model: their disjoint union is its state_dict.

    Args:
        model: any module that torch.fx can trace; an ``nn.Sequential`` is not traced at granularity ``block``.
        num_stages: K.
        balance: units of each stage, or the names of the units where stages 1..K-1 begin; None: as even as can be.
        granularity: what a unit is; see :func:`linearise`.

    Raises:
        PartitionError: it cannot be traced, has too few units, or cannot be cut there.
    """
    if num_stages == 1 and balance is None:
        return [model]
    chain = linearise(model, granularity=granularity)
    sizes = even_sizes(chain, num_stages) if balance is None else checked_sizes(chain, num_stages, balance)
    return [model] if num_stages == 1 else chain.pieces(sizes)


def even_balance(num_units: int, num_stages: int) -> list[int]:
    """Return the units of each stage, as equal as can be; the last stages take one more where it does not divide.

    Raises:
        PartitionError: fewer units than stages.
    """
    if num_stages > num_units:
        raise PartitionError(
            f"partition.num_stages={num_stages} needs at least {num_stages} units, but the model has {num_units}; "
            f"use at most partition.num_stages={num_units}, or partition.granularity=layer, which looks inside blocks"
        )
    few, extra = divmod(num_units, num_stages)
    return [few + (stage >= num_stages - extra) for stage in range(num_stages)]


def even_sizes(chain: Chain, num_stages: int) -> list[int]:
    """Return the units of each stage, as equal as can be where the chain can be cut.

    Raises:
        PartitionError: fewer units than stages, or too few possible cuts.
    """
    sizes = even_balance(len(chain.units), num_stages)
    if not any(cut in chain.forbidden for cut in _cuts(sizes)):
        return sizes
    num_places = len(chain.units) - 1 - len(chain.forbidden)
    if num_places < num_stages - 1:
        reason = next(iter(chain.forbidden.values()))
        raise PartitionError(
            f"partition.num_stages={num_stages}: the model has {num_places} place(s) where it can be cut; among the "
            f"others, {reason}; use at most partition.num_stages={num_places + 1}, or untie them"
        )
    same = [
        UnitCost(name=name, forward=1.0, backward=0.0, may_cut=unit not in chain.forbidden)
        for unit, name in enumerate(chain.units)
    ]
    return best_balance(same, num_stages=num_stages, held=[StageFootprint(graphs=1)] * num_stages).sizes


def checked_sizes(chain: Chain, num_stages: int, balance: Sequence[int] | Sequence[str]) -> list[int]:
    """Return the units of each stage for a user's ``balance``.

    Args:
        chain: the model's units.
        num_stages: K.
        balance: K numbers of units, or K - 1 names of the units (or blocks) where the next stage begins.

    Raises:
        PartitionError: it does not fit the chain, or asks for a cut that cannot be made.
    """
    num_units = len(chain.units)
    if balance and all(isinstance(entry, str) for entry in balance):
        begins = [user_frame(str(name), chain.units) for name in balance]
        if len(begins) != num_stages - 1 or begins != sorted({*begins}) or 0 in begins:
            raise PartitionError(
                f"partition.balance=[{', '.join(map(str, balance))}] does not fit: expected {num_stages - 1} names, of "
                f"the units where stages 1 to {num_stages - 1} begin, in the order they run"
            )
        ends = [*begins, num_units]
        sizes = [end - begin for begin, end in zip([0, *begins], ends, strict=True)]
    else:
        sizes = [int(size) for size in balance]
    if len(sizes) != num_stages or sum(sizes) != num_units or min(sizes, default=0) < 1:
        raise PartitionError(
            f"partition.balance={sizes} does not fit: expected {num_stages} numbers, each at least 1, that add up to "
            f"the model's {num_units} units ({_some(chain.units)}), got {len(sizes)} that add up to {sum(sizes)}"
        )
    for cut in _cuts(sizes):
        if cut in chain.forbidden:
            raise PartitionError(
                f"the model cannot be cut after {chain.units[cut]}: {chain.forbidden[cut]}; choose a "
                "partition.balance that keeps both on one stage, or untie them"
            )
    return sizes


def _cuts(sizes: Sequence[int]) -> list[int]:
    """Return the units after which ``sizes`` cut."""
    return [sum(sizes[: stage + 1]) - 1 for stage in range(len(sizes) - 1)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:6], "...", *names[-3:]])
