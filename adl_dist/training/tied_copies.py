"""Tied weights: each stage gets a copy, or each name does."""

import copy
from collections.abc import Iterable

from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.optimizers import take_role
from adl_dist.partition.stage_module import StageModule
from adl_dist.partition.stage_plan import StagePlan

Ties = dict[tuple[int, ...], list[str]]  # of the stages that hold copies, the first names of the parameters


def tie_copies(model: nn.Module, plan: StagePlan, stages: Iterable[StageModule]) -> tuple[Ties, list[str]]:
    """Return the ties of ``stages`` of ``model``, with a note each.

    The copies on ``stages`` get the optimizer roles of the originals.

    Raises:
        PartitionError: If something looks at the gradient of a tied parameter.
    """
    ties: Ties = {}
    notes = []
    for first, parameter in model.named_parameters():
        holders = plan.holders[first]
        if not parameter.requires_grad or len(holders) < 2:
            continue
        _check_unwatched(parameter, first)
        ties.setdefault(holders, []).append(first)
        names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
        notes.append(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} one parameter: stages "
            f"{', '.join(map(str, holders))} each hold a copy and apply the sum of all gradients (partition.tied=share)"
        )
        for stage in stages:
            if first in stage.copies:
                take_role(parameters_by_name(stage)[first], parameter)
    return ties, notes


def parameters_by_name(stage: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by all of their names."""
    return dict(stage.named_parameters(remove_duplicate=False))


def _check_unwatched(parameter: nn.Parameter, name: str) -> None:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PartitionError(
            f"'{name}' is used on several stages and has a hook on its gradient, which would see a part of it on each "
            "stage that holds a copy; remove the hook, or choose a cut with all its uses on one stage"
        )


def untied(model: nn.Module) -> dict[str, str]:
    """Untie the parameters of ``model`` in place.

    Returns:
        the names that shared one, each with the name that has kept it.
    """
    kept = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {}
    for module_name, module in model.named_modules():
        for name, parameter in [*module.named_parameters(prefix=module_name, recurse=False, remove_duplicate=False)]:
            if kept[id(parameter)] != name:
                _check_unwatched(parameter, name)
                take_role(twin := copy.deepcopy(parameter), parameter)
                setattr(module, name.rpartition(".")[2], twin)
                names[name] = kept[id(parameter)]
    return names
