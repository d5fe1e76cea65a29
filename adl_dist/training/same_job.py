"""What a rank tells the others of the objects that its script has made, since all must have made the same.

A script has no settings, so it is told what its objects hold: numbers of modules, of the loss, and of the functions
that make optimizers and schedules. What these make is compared, too; that may depend on the stage.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from adl_dist.checkpoint.identity import described, merged
from adl_dist.errors import ConfigError
from adl_dist.training.agreement import first_difference
from adl_dist.training.unchanged import reached

NUMBERS = bool, int, float
MOST_NUMBERS = 64  # in a container that is a setting
_OF_TORCH = {*nn.Module().__dict__}


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return class and numbers of each module of ``model``, by its name."""
    return {
        name: {"class": type(module).__name__}
        | {key: described(value) for key, value in vars(module).items() if key not in _OF_TORCH and _is_number(value)}
        for name, module in model.named_modules()
    }


def told_of(thing: object) -> Any:
    """Return plain values that tell a loss, or what makes optimizers or schedules, from another."""
    if isinstance(thing, partial):
        return {"of": told_of(thing.func), "with": described([*thing.args, thing.keywords])}
    if not isinstance(thing, FunctionType):
        return described(thing)
    code = thing.__code__
    numbers = [each for each in code.co_consts if each is not None and not isinstance(each, CodeType | str | tuple)]
    held = {
        key: described(value)
        for key, value in reached(thing, depth=0)
        if _is_number(value) or isinstance(value, Tensor)
    }
    return {"name": thing.__name__, "names": [*code.co_names], "numbers": described(numbers), **held}


def check_made(by_rank: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the descriptions of what all ranks have ``made``, of each stage's optimizer and schedule.

    Raises:
        ConfigError: two ranks have made others, by other functions.
    """
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        difference = None
        if first["made"] and other["made"]:  # a rank without trained weights makes nothing
            difference = first_difference(_made(first), _made(other))
        if difference is not None and first["by"] != other["by"]:
            name, value, another = difference
            raise ConfigError(
                f"rank 0 and rank {rank} do not train alike: {name} is {value} on rank 0 and {another} on rank {rank}; "
                "let all ranks make the same optimizer and lr_schedule"
            )
    return [one for each in by_rank for one in each["made"]]


def _made(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank's optimizers and schedules have in them, by kind."""
    return {kind: merged(one[kind] for one in told["made"] if kind in one) for kind in ("optimizer", "lr_schedule")}


def _is_number(value: object) -> bool:
    """Return whether it is a number, or a few."""
    if isinstance(value, list | tuple):
        return len(value) <= MOST_NUMBERS and all(isinstance(each, NUMBERS) for each in value)
    return isinstance(value, NUMBERS)
