"""What a rank tells the others of the objects that its script has made, since all must have made the same.

A script has no settings to compare. So ranks compare the numbers that its objects hold: those of modules, of the loss,
and of the functions that make optimizers and schedules. They also compare what these functions make, which may depend
on the stage.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from adl_dist.checkpoint.constants import sampled
from adl_dist.checkpoint.identity import described, merged
from adl_dist.errors import ConfigError
from adl_dist.memory import has_plain_memory
from adl_dist.partition.state_walk import OF_TORCH, is_of_a_library, names_used_by
from adl_dist.training.agreement import first_difference
from adl_dist.training.unchanged import reached

NUMBERS = bool, int, float
MOST_NUMBERS = 64  # in a container that is a setting
OF_A_RANK = {"rank", "local_rank", "global_rank"}  # what a script may hold that is another number on each rank


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return class and numbers of each module of ``model``, by its name; of the user's own, what their forwards name.

    So times and identities that a module notes when it is made may differ.
    """
    told = {}
    for name, module in model.named_modules():
        kind, held = type(module), {}
        used = None if is_of_a_library(kind) else names_used_by(kind)
        for key, value in vars(module).items():
            is_used = key not in OF_A_RANK if used is None else key in used - OF_A_RANK
            if is_used and key not in OF_TORCH and _is_number(value):
                held[key] = described(value)
        told[name or "the model"] = {"class": kind.__name__, **held}
    return told


def told_of(thing: object, *, with_rank: bool = False) -> Any:
    """Return plain values that tell a loss, or what makes optimizers or schedules, from another.

    ``with_rank``: also numbers called ``rank`` and the like, which may differ where they decide nothing.
    """
    if isinstance(thing, partial):
        return {"of": told_of(thing.func, with_rank=with_rank), "with": described([*thing.args, thing.keywords])}
    if not isinstance(thing, FunctionType):
        return _told_of_object(thing)
    code = thing.__code__
    numbers = [each for each in code.co_consts if isinstance(each, NUMBERS)]
    reads = {key: value for key, value in reached(thing, depth=0) if with_rank or key.lower() not in OF_A_RANK}
    return {
        "name": thing.__name__,
        "names": [*code.co_names],
        "numbers": described(numbers),
        **{key: described(value) for key, value in reads.items() if _is_number(value)},
        **sampled(
            (key, value) for key, value in reads.items() if isinstance(value, Tensor) and has_plain_memory(value)
        ),
    }


def _told_of_object(thing: object) -> Any:
    """Return what tells an object that is called from another one: of the user's own class, what its code names."""
    kind = type(thing)
    if thing is None or isinstance(thing, type | nn.Module) or is_of_a_library(kind) or not hasattr(thing, "__dict__"):
        return described(thing)
    used = names_used_by(kind)
    held = {key: value for key, value in vars(thing).items() if key in used and _is_number(value)}
    return {"name": kind.__name__, **{key: described(value) for key, value in held.items()}}


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
