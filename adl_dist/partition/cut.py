"""The units of each stage: by number, by name, evenly, or by work."""

import difflib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from adl_dist.errors import PartitionError
from adl_dist.partition.balance import best_balance
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import StageFootprint, UnitCost
from adl_dist.partition.stage_plan import CutImpossibleError

MOST_ABOVE_MEAN = 0.15  # of the slowest stage; beyond it blocks are opened
Found = TypeVar("Found")


def flops_sizes(chain: Chain, num_stages: int, *, opens: bool = True) -> list[int]:
    """Return each stage's number of units, for least work on the slowest.

    Cuts lie between blocks. They also lie inside blocks if there are too few places between them, or if the work would
    be too uneven and ``opens`` is set.
    """
    sizes = _best(chain, num_stages, opened=())
    opened: set[int] = set()
    while opens and slowest_above_mean(chain, sizes) > MOST_ABOVE_MEAN:
        # Open the blocks next to the cuts of the stage with most work; once they are open, those next to all cuts.
        loads, cuts = loads_of(chain, sizes), [*accumulate(sizes)][:-1]
        k = loads.index(max(loads))
        next_to = [{chain.blocks[cut - 1], chain.blocks[cut]} for cut in cuts]
        more = set[int]().union(*next_to[max(k - 1, 0) : k + 1])
        if more <= opened:
            more = set[int]().union(*next_to)
        if more <= opened:
            break
        opened |= more
        sizes = _best(chain, num_stages, opened=opened)
    return sizes


def loads_of(chain: Chain, sizes: Sequence[int]) -> list[float]:
    """Return each stage's share of the work."""
    return [sum(chain.work[start:stop]) for start, stop in pairwise([0, *accumulate(sizes)])]


def slowest_above_mean(chain: Chain, sizes: Sequence[int]) -> float:
    """Return the slowest stage's work divided by the mean work, minus 1."""
    return max(loads_of(chain, sizes)) * len(sizes) - 1


def even_sizes(chain: Chain, num_stages: int) -> list[int]:
    """Return each stage's number of units, for equal numbers of blocks.

    With granularity ``layer`` the numbers of units are equal instead. The last stages take one more if K does not
    divide it.
    """
    of_blocks = chain.granularity == "block"
    few, extra = divmod(len(chain.block_names) if of_blocks else len(chain.units), num_stages)
    counts = [few + (stage >= num_stages - extra) for stage in range(num_stages)]
    if few > 0:
        sizes = chain.sizes_of(counts) if of_blocks else counts
        if chain.forbidden.keys().isdisjoint(stop - 1 for stop in accumulate(sizes[:-1])):
            return sizes
    new = [place == 0 or chain.blocks[place] != chain.blocks[place - 1] for place in range(len(chain.units))]
    costs = [float(is_new or not of_blocks) for is_new in new]
    return _balanced(chain, num_stages, costs, lambda unit: unit not in chain.forbidden)


def _best(chain: Chain, num_stages: int, *, opened: Sequence[int] | set[int]) -> list[int]:
    blocks, may_open = chain.blocks, {*opened}
    between = {unit for unit, (one, other) in enumerate(pairwise(blocks)) if one != other or one in may_open}
    allowed = [unit for unit in between if unit not in chain.forbidden]
    if len(allowed) < num_stages - 1:
        between = {*range(len(blocks) - 1)}
    return _balanced(chain, num_stages, chain.work, lambda unit: unit in between and unit not in chain.forbidden)


def _balanced(chain: Chain, num_stages: int, costs: Sequence[float], may_cut: Callable[[int], bool]) -> list[int]:
    check_places(chain, num_stages)
    units = [
        UnitCost(name=name, forward=cost, backward=0.0, may_cut=may_cut(place))
        for place, (name, cost) in enumerate(zip(chain.units, costs, strict=True))
    ]
    return best_balance(units, num_stages=num_stages, held=[StageFootprint(graphs=1)] * num_stages).sizes


def check_places(chain: Chain, num_stages: int) -> None:
    """Raise a PartitionError if the chain has too few places for K-1 cuts."""
    places = len(chain.units) - 1 - len(chain.forbidden)
    if places < num_stages - 1:
        because = ""
        if chain.forbidden:
            unit, reason = next(iter(chain.forbidden.items()))
            because = f"; after '{chain.units[unit]}', for example, it cannot: {reason}"
        raise PartitionError(
            f"partition.num_stages={num_stages} needs {num_stages - 1} cuts, but the model can be cut in {places} "
            f"place(s){because}; use at most partition.num_stages={places + 1}"
        )


def checked_sizes(chain: Chain, num_stages: int, balance: Sequence[int] | Sequence[str]) -> list[int]:
    """Return each stage's number of units for the ``balance`` of the user.

    ``balance`` has K numbers of blocks, or the names of the K-1 units where stages 1 to K-1 begin.

    Raises:
        PartitionError: If the numbers or names do not fit the model, or the model cannot be cut there.
    """
    if balance and all(isinstance(entry, str) for entry in balance):
        begins = [_unit_named(str(name), chain) for name in balance]
        if len(begins) != num_stages - 1 or begins != sorted({*begins}) or 0 in begins:
            raise PartitionError(
                f"partition.balance=[{', '.join(map(str, balance))}] does not fit: expected {num_stages - 1} names, of "
                f"the units where stages 1 to {num_stages - 1} begin, in the order in which they run"
            )
        sizes = [stop - start for start, stop in pairwise([0, *begins, len(chain.units)])]
    else:
        counts, num_blocks, names = [int(size) for size in balance], len(chain.block_names), chain.block_names
        if len(counts) != num_stages or sum(counts) != num_blocks or min(counts, default=0) < 1:
            some = ", ".join(names if num_blocks <= 12 else [*names[:6], "...", *names[-3:]])
            raise PartitionError(
                f"partition.balance={counts} does not fit: expected {num_stages} numbers, each at least 1, that add up "
                f"to the model's {num_blocks} blocks ({some}), got {len(counts)} that add up to {sum(counts)}"
            )
        sizes = chain.sizes_of(counts)
    for stop in accumulate(sizes[:-1]):
        if stop - 1 in chain.forbidden:
            raise PartitionError(
                f"the model cannot be cut after '{chain.units[stop - 1]}': {chain.forbidden[stop - 1]}; choose another "
                "partition.balance"
            )
    return sizes


def attempt(chain: Chain, choose: Callable[[], list[int]], make: Callable[[list[int]], Found], *, fixed: bool) -> Found:
    """Return the result of ``make`` for the first possible choice of sizes.

    A cut that turns out to be impossible is forbidden, and ``choose`` is called again.

    Raises:
        PartitionError: If no cut is left, or ``fixed`` sizes cannot be cut.
    """
    while True:
        sizes = choose()
        try:
            return make(sizes)
        except CutImpossibleError as error:
            if fixed:
                raise
            chain.forbidden.setdefault(sum(sizes[: error.stage + 1]) - 1, error.reason)


def begins_of(chain: Chain, sizes: Sequence[int]) -> list[str]:
    """Return the names of the units where stages 1..K-1 begin."""
    return [chain.units[stop] for stop in accumulate(sizes[:-1])]


def _unit_named(name: str, chain: Chain) -> int:
    """Return the index of the unit ``name``, or of that module's first unit."""
    for unit, known in enumerate(chain.units):
        if known == name or known.startswith(f"{name}."):
            return unit
    if name in chain.block_names:
        return chain.blocks.index(chain.block_names.index(name))
    known_names = list(dict.fromkeys([*chain.block_names, *chain.units]))
    same_end = [known for known in known_names if known.endswith(f".{name}") or known.rpartition(".")[2] == name]
    close = [*same_end, *difflib.get_close_matches(name, known_names, n=3)] or chain.units[:3]
    raise PartitionError(
        f"partition.balance: there is no unit or block '{name}'; near it are {', '.join(dict.fromkeys(close[:3]))}; "
        "adl-dist plan --units lists them all"
    )
