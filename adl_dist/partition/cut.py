"""Cuts a sequential model into K stages without renaming a single parameter."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from adl_dist.errors import PartitionError


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The pieces between which ``model`` can be cut, with their names, in the order they run.

    A plain ``nn.Sequential`` has one unit per child, a child that stands twice having two; any other module,
    also a Sequential with a ``forward`` or hooks of its own, is one unit.
    """
    if is_plain_sequential(model):
        return [(name, child) for name, child in model._modules.items() if child is not None]
    return [("", model)]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether running the children one after the other is all that ``model`` does."""
    return (
        isinstance(model, nn.Sequential)
        and type(model).forward is nn.Sequential.forward
        and not model._forward_hooks
        and not model._forward_pre_hooks
    )


def even_balance(num_units: int, num_stages: int) -> list[int]:
    """Units of each stage, as equal as can be; the last stages take one more where it does not divide.

    Raises:
        PartitionError: fewer units than stages.
    """
    if num_stages > num_units:
        raise PartitionError(
            f"partition.num_stages={num_stages} needs at least {num_stages} units, but the model has {num_units}; "
            f"use at most partition.num_stages={num_units}, or hand over an nn.Sequential of more blocks"
        )
    few, extra = divmod(num_units, num_stages)
    return [few + (stage >= num_stages - extra) for stage in range(num_stages)]


def cut(model: nn.Module, *, num_stages: int, balance: Sequence[int] | None = None) -> list[nn.Module]:
    """Cut ``model`` into stages that together hold exactly its modules.

    The state_dict keys of the stages are those of the uncut model: their disjoint union is its state_dict.

    Args:
        model: an ``nn.Sequential`` (or, for one stage, any module).
        num_stages: K.
        balance: units of each stage; None: as even as can be.

    Raises:
        PartitionError: too few units, a balance that does not add up, a parameter shared by two stages.
    """
    units = units_of(model)
    if num_stages > 1 and not is_plain_sequential(model):
        kind = "has a forward or hooks of its own" if isinstance(model, nn.Sequential) else "is not an nn.Sequential"
        raise PartitionError(
            f"{type(model).__name__} cannot be cut into {num_stages} stages: it {kind}, so where one block ends is not "
            "known; hand over an nn.Sequential of its blocks, or use partition.num_stages=1"
        )
    sizes = even_balance(len(units), num_stages) if balance is None else list(balance)
    if len(sizes) != num_stages or sum(sizes) != len(units) or min(sizes, default=0) < 1:
        raise PartitionError(
            f"partition.balance={sizes} does not fit: expected {num_stages} numbers, each at least 1, that add up to "
            f"the model's {len(units)} units ({', '.join(name for name, _ in units)}), got {len(sizes)} that add up "
            f"to {sum(sizes)}"
        )
    if num_stages == 1:
        return [model]
    stages, start = [], 0
    for size in sizes:
        stages.append(nn.Sequential(OrderedDict(units[start : start + size])))
        start += size
    _refuse_shared_tensors(stages)
    return list(stages)


def _refuse_shared_tensors(stages: Sequence[nn.Module]) -> None:
    home: dict[int, tuple[int, str]] = {}
    for stage, module in enumerate(stages):
        for name, tensor in module.state_dict(keep_vars=True).items():
            other, first_name = home.setdefault(id(tensor), (stage, name))
            if other != stage:
                raise PartitionError(
                    f"'{first_name}' on stage {other} and '{name}' on stage {stage} are one and the same tensor; "
                    "choose a partition.balance that keeps both on one stage, or untie them"
                )
