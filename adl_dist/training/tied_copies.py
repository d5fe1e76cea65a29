"""Tied weights: each stage gets a copy, or each name does."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.optimizers import take_role
from adl_dist.partition.stage_module import StageModule
from adl_dist.partition.stage_plan import StagePlan


@dataclass(frozen=True)
class TiedCopies:
    """The trained weights with a copy in several stages."""

    stages: tuple[tuple[int, ...], ...] = ()  # of each tie, in order
    names: Sequence[list[str]] = ()  # of the parameters of each tie
    aliases: dict[str, list[str]] = field(default_factory=dict)  # all names of a parameter, by its first

    @classmethod
    def of(cls, model: nn.Module, plan: StagePlan) -> "TiedCopies":
        """Return the ties of the stages that ``plan`` makes of ``model``.

        Raises:
            PartitionError: If something looks at the gradient of a tied parameter.
        """
        by_stages: dict[tuple[int, ...], list[str]] = {}
        aliases: dict[str, list[str]] = {}
        for first, parameter in model.named_parameters():
            if parameter.requires_grad and len(plan.holders[first]) > 1:
                _check_unwatched(parameter, first)
                by_stages.setdefault(plan.holders[first], []).append(first)
                named = model.named_parameters(remove_duplicate=False)
                aliases[first] = [name for name, other in named if other is parameter]
        return cls(tuple(by_stages), [*by_stages.values()], aliases)

    def mark(self, model: nn.Module, stages: Iterable[StageModule]) -> None:
        """Give the copies on ``stages`` the optimizer roles of the originals."""
        for stage in stages:
            for name in {name for names in self.names for name in names} & {*stage.copies}:
                take_role(stage.get_parameter(name), model.get_parameter(name))

    def of_stage(self, k: int, module: nn.Module) -> dict[int, dict[str, nn.Parameter]]:
        """Return the parameters of stage ``k`` for each tie, by name."""
        return {
            number: {name: module.get_parameter(name) for name in self.names[number]}
            for number, stages in enumerate(self.stages)
            if k in stages
        }

    def notes(self) -> list[str]:
        """Return a line about each parameter."""
        return [
            f"{' and '.join(self.aliases[name])} {'is' if len(self.aliases[name]) == 1 else 'are'} one parameter: "
            f"stages {', '.join(map(str, stages))} each hold a copy and apply the sum of all gradients "
            "(partition.tied=share)"
            for stages, names in zip(self.stages, self.names, strict=True)
            for name in names
        ]


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
