"""Weights that a model has under several names: each stage gets a copy of its own, or each name does."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.memory import memory_of
from adl_dist.optimizers import take_role
from adl_dist.partition.module_state import tensors_reached
from adl_dist.partition.ties import replace_parameter
from adl_dist.training.trial.homes import units_of


@dataclass(frozen=True)
class TiedCopies:
    """The trained weights of which several stages hold a copy.

    Attributes:
        stages: of each tie the stages that do, in order.
        names: of each tie, by the first name that the uncut model has for a parameter, its name on each of its stages.
    """

    stages: tuple[tuple[int, ...], ...] = ()
    names: Sequence[dict[str, dict[int, str]]] = field(default_factory=list)

    def of_stage(self, k: int, module: nn.Module) -> dict[int, dict[str, nn.Parameter]]:
        """Return the parameters of ``module``, stage ``k``, for each of its ties, by the first of their names."""
        return {
            number: {first: module.get_parameter(local[k]) for first, local in self.names[number].items()}
            for number, stages in enumerate(self.stages)
            if k in stages
        }

    def notes(self) -> list[str]:
        """Return a line about each parameter."""
        return [
            f"{' and '.join(dict.fromkeys(local.values()))} are one parameter: stages {', '.join(map(str, local))} "
            "each hold a copy and apply the sum of all gradients (partition.tied=share)"
            for names in self.names
            for local in names.values()
        ]


def copied(model: nn.Module, pieces: Sequence[nn.Module]) -> TiedCopies:
    """Give all but the first of the ``pieces`` of ``model`` that hold a trained parameter a copy of it each, in place.

    Raises:
        PartitionError: one of these reaches the parameter in another way, too.
    """
    homes: dict[int, dict[int, str]] = {}
    for k, piece in enumerate(pieces):
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                homes.setdefault(id(parameter), {}).setdefault(k, name)
    by_stages: dict[tuple[int, ...], dict[str, dict[int, str]]] = {}
    for first, parameter in model.named_parameters():
        stages = homes.get(id(parameter), {})
        if len(stages) > 1:
            by_stages.setdefault(tuple(stages), {})[first] = stages
            for k in [*stages][1:]:
                _give_copy(pieces[k], k, stages[k], parameter)
    return TiedCopies(tuple(by_stages), [*by_stages.values()])


def _give_copy(piece: nn.Module, k: int, name: str, parameter: nn.Parameter) -> None:
    twin = _twin(parameter, name)
    replace_parameter(piece, parameter, twin)
    for place, tensor in tensors_reached(piece):
        if memory_of(tensor) == memory_of(parameter):
            raise PartitionError(
                f"stage {k} ({units_of(piece)}) needs a copy of '{name}', which is tied to weights of another stage, "
                f"but reaches those by '{place}', too; use nothing but the registered parameter there, or "
                "partition.tied=untie"
            )


def _twin(parameter: nn.Parameter, name: str) -> nn.Parameter:
    """Return a copy of ``parameter``; raise PartitionError if something looks at the gradients of that alone."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PartitionError(
            f"'{name}' is one parameter under several names and has a hook on its gradient, which would see a part of "
            "it on each stage that holds a copy; remove the hook, or choose a cut with all its uses on one stage"
        )
    twin = copy.deepcopy(parameter)
    take_role(twin, parameter)
    return twin


def untied(model: nn.Module) -> dict[str, str]:
    """Give each name of a parameter of ``model`` one of its own, in place.

    Returns:
        the names that shared one, each with the name that has kept it.
    """
    kept = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {}
    for module_name, module in model.named_modules():
        for name, parameter in [*module.named_parameters(prefix=module_name, recurse=False, remove_duplicate=False)]:
            if kept[id(parameter)] != name:
                setattr(module, name.rpartition(".")[2], _twin(parameter, name))
                names[name] = kept[id(parameter)]
    return names
