"""The state of the stages' optimizers in a checkpoint.

Of each parameter, in any cut under its name: all that the optimizer remembers of it, and that ``method.mitigation``
does. Of each stage: values of ``param_groups`` that have changed since the optimizer was made, ``state`` under a name,
and entries that the optimizer's class adds to its ``state_dict()``. These belong to one stage, so they come back only
where the cut is the same. Values that the learning rate schedule sets are not stored: they are functions of the update
index.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from adl_dist.checkpoint import nested, tensor_files
from adl_dist.checkpoint.nested import PLAIN, Packer, Unstorable
from adl_dist.checkpoint.tensor_files import Shard, Stored
from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.stage import Learner

# What names of metadata begin with; no name of a module has a colon.
OF_PARAMETER, OF_STAGE, OF_MITIGATION = "parameter:", "optimizer:", "mitigation:"
GROUPS, STATE, ENTRY = "param_groups[", "state.", "state_dict."  # begin the names of values of a stage
ENTRIES = "state", "param_groups"  # of the state_dict() of every optimizer


def shard_of(learner: Learner) -> Shard:
    """Return the optimizer state of ``learner``, empty if it has no optimizer.

    Raises:
        ConfigError: a part of it cannot be saved.
    """
    if learner.optimizer is None:
        return Shard({})
    parameters = _parameters(learner, learner.optimizer)
    names = {parameter: name for name, parameter in reversed(parameters.items())}  # the first of several
    packer = Packer(_device_of(parameters))
    metadata = {}
    try:
        for parameter, state in learner.optimizer.state.items():
            if isinstance(parameter, str) or not state:
                continue
            if (name := names.get(parameter)) is None:
                raise Unstorable(
                    f"its state has a key that is no parameter of the stage but a {type(parameter).__name__}"
                )
            metadata[f"{OF_PARAMETER}{name}"] = json.dumps(packer.packed(name, dict(state)))
        for parameter, past in learner.mitigation.history.items() if learner.mitigation is not None else ():
            place = f"{OF_MITIGATION}{names[parameter]}"
            metadata[place] = json.dumps(packer.packed(place, past))
        if values := _stage_values(learner, learner.optimizer):
            place, groups = f"{OF_STAGE}{learner.key}", _groups(learner.optimizer, parameters)
            metadata[place] = json.dumps({"groups": groups, "values": packer.packed(place, values)})
    except Unstorable as error:
        said = str(error).removeprefix(f"{OF_STAGE}{learner.key}.")
        raise ConfigError(
            f"{learner.where}: what {type(learner.optimizer).__name__} remembers cannot be saved: {said}. Without it a "
            "resumed run would differ; choose another optimizer, or train without run_dir"
        ) from None
    return Shard(packer.tensors, metadata)


def restore(where: str, learner: Learner, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Restore the saved optimizer state of ``learner``, for any cut.

    ``where`` names the checkpoint in errors. ``load_state_dict`` reads only entries of its own: it turns ints into
    tensors and casts tensors to the dtype of their parameter.

    Raises:
        CheckpointError: values of a stage were saved, and no stage had the parameters that this one has.
    """
    if learner.optimizer is None:
        return
    parameters = _parameters(learner, learner.optimizer)
    kept = ((name, metadata[key]) for name in parameters if (key := f"{OF_PARAMETER}{name}") in metadata)
    states = {name: json.loads(text) for name, text in kept}
    # A stage that has become fresh has no use for what was remembered of its parameters; one that has become stale
    # begins to remember.
    used = parameters if learner.mitigation is not None else ()
    pasts = {name: json.loads(metadata[key]) for name in used if (key := f"{OF_MITIGATION}{name}") in metadata}
    values = _values_for(where, _groups(learner.optimizer, parameters), metadata)
    names = {*nested.tensor_names([*states.values(), *pasts.values(), values])}
    read = dict(tensor_files.read({name: tensors[name] for name in names}))
    place = partial(
        nested.unpacked,
        tensors=read,
        device=_device_of(parameters),
        steps_on_cpu=not any(g.get("capturable") or g.get("fused") for g in learner.optimizer.param_groups),
    )
    of_stage = place(values)
    if entries := {name.removeprefix(ENTRY): value for name, value in of_stage.items() if name.startswith(ENTRY)}:
        learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), **entries})
    for name, packed in states.items():
        learner.optimizer.state[parameters[name]] = place(packed)
    for name, packed in pasts.items():
        assert learner.mitigation is not None
        learner.mitigation.history[parameters[name]] = place(packed)
    for name, value in of_stage.items():
        if name.startswith(GROUPS):
            number, _, key = name.removeprefix(GROUPS).partition("].")
            learner.optimizer.param_groups[int(number)][key] = value
        elif name.startswith(STATE):
            learner.optimizer.state[name.removeprefix(STATE)] = value


def saved_values(metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the values of each stage, and the names that are ignored now.

    The latter are of version 0.3.8.
    """
    saved = [json.loads(text) for name, text in metadata.items() if name.startswith(OF_STAGE)]
    for one in saved:
        pairs = one["values"]["dict"]
        one["values"]["dict"] = [pair for pair in pairs if pair[0].startswith((GROUPS, STATE, ENTRY))]
        one["ignored"] = [name for name, _ in pairs if not name.startswith((GROUPS, STATE, ENTRY))]
    return saved


def _parameters(learner: Learner, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters of ``optimizer`` by all their names, of each the first one first."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # The cut decides under which of its names the state of a parameter was saved.
    named = *learner.named_parameters(), *learner.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if id(p) in held}


def _groups(optimizer: Optimizer, parameters: dict[str, Tensor]) -> list[list[str]]:
    """Return the first names of the parameters of each group."""
    first = {id(p): name for name, p in reversed(parameters.items())}
    return [[first[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _stage_values(learner: Learner, optimizer: Optimizer) -> dict[str, Any]:
    """Return the values to save that belong to no single parameter, by name."""
    not_saved = {"params", *learner.scheduled}
    changed = {
        f"{GROUPS}{number}].{key}": value
        for number, (group, first) in enumerate(zip(optimizer.param_groups, learner.initial_groups, strict=False))
        for key, value in group.items()
        if key not in not_saved and not (key in first and _are_equal(first[key], value))
    }
    state: Mapping[Any, Any] = optimizer.state
    by_name = {f"{STATE}{key}": value for key, value in state.items() if isinstance(key, str)}
    entries = {f"{ENTRY}{key}": value for key, value in optimizer.state_dict().items() if key not in ENTRIES}
    return {**changed, **by_name, **entries}


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether nested values are equal, or identical if they are opaque."""
    (ones, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind == other_kind and all(map(_are_equal_leaves, ones, others))


def _are_equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other))


def _values_for(where: str, groups: list[list[str]], metadata: Mapping[str, str]) -> Any:
    """Return the packed values of the stage with the parameters in ``groups``."""
    saved = saved_values(metadata)
    for one in saved:
        if one["groups"] == groups:
            return one["values"]
    here = {name for group in groups for name in group}
    for one in (one for one in saved if one["values"]["dict"]):
        if any(name in here for group in one["groups"] for name in group):
            names = ", ".join(str(key) for key, _ in one["values"]["dict"][:3])
            raise CheckpointError(
                f"{where} holds values that an optimizer keeps for all parameters of a stage ({names}), and the model "
                "is cut differently now; resume with the partition that it was made with, or start a new run with "
                "init_from= in another run_dir"
            )
    return {"dict": []}


def _device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
