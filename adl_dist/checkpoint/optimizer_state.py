"""The state of the stages' optimizers in a checkpoint.

Saved for each parameter, under its name in the uncut model: the optimizer's state, and the history of
``method.mitigation``. It is restored under any cut. Saved for each stage: changed values of ``param_groups``, entries
of the optimizer's ``state`` with text as key, and entries that its class adds to ``state_dict()``. These belong to the
whole stage, so they are restored only if its cut is the same. Values that the learning rate schedule sets are not
saved, because they are functions of the update index.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from adl_dist.checkpoint import nested
from adl_dist.checkpoint.nested import CPU, PLAIN, Packer, Unstorable
from adl_dist.checkpoint.tensor_files import Shard, Stored
from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.stage import Learner

# What names of metadata begin with; no name of a module has a colon.
OF_PARAMETER, OF_STAGE, OF_MITIGATION = "parameter:", "optimizer:", "mitigation:"
GROUPS, STATE, ENTRY = "param_groups[", "state.", "state_dict."  # begin the names of values of a stage
ENTRIES = "state", "param_groups"  # of the state_dict() of every optimizer


def shard_of(learner: Learner) -> Shard:
    """Return the optimizer state of ``learner`` to save, or raise ConfigError.

    It is empty without an optimizer.
    """
    if learner.optimizer is None:
        return Shard({})
    parameters = _parameters(learner, learner.optimizer)
    names: dict[Any, str] = {
        parameter: name for name, parameter in reversed(parameters.items())
    }  # the first of several
    packer = Packer(_device_of(parameters))
    metadata = {}
    try:
        for parameter, state in learner.optimizer.state.items():
            if isinstance(parameter, str) or not state:
                continue
            if parameter not in names:
                raise Unstorable(f"its state has a key that is a {type(parameter).__name__}, no parameter of the stage")
            metadata[f"{OF_PARAMETER}{names[parameter]}"] = json.dumps(packer.packed(names[parameter], dict(state)))
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


def restore(where: str, learner: Learner, stored: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Restore the optimizer state of ``learner``, also under a different cut.

    ``where`` names the checkpoint in errors. Only the optimizer's own extra entries go through ``load_state_dict``,
    which turns ints into tensors and casts tensors to their parameter's dtype. Raise CheckpointError if values of a
    whole saved stage belong to some of these parameters, and no saved stage has exactly these.
    """
    if learner.optimizer is None:
        return
    optimizer: Any = learner.optimizer
    parameters = _parameters(learner, optimizer)
    remembers: dict[str, Any] = {OF_PARAMETER: optimizer.state}
    # A stage that has become fresh has no use for what was remembered of its parameters; one that has become stale
    # begins to remember.
    if learner.mitigation is not None:
        remembers[OF_MITIGATION] = learner.mitigation.history
    wanted = [f"{kind}{name}" for kind in remembers for name in parameters]
    wanted += _of_stage(where, _groups(optimizer, parameters), metadata)
    values = nested.unpacked(
        {key: metadata[key] for key in wanted if key in metadata},
        stored,
        _device_of(parameters),
        steps_on_cpu=not any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups),
    )
    of_stage: dict[str, Any] = next((value["values"] for key, value in values.items() if key.startswith(OF_STAGE)), {})
    if entries := {name.removeprefix(ENTRY): value for name, value in of_stage.items() if name.startswith(ENTRY)}:
        optimizer.load_state_dict({**optimizer.state_dict(), **entries})
    for kind, state in remembers.items():
        for name, parameter in parameters.items():
            if f"{kind}{name}" in values:
                state[parameter] = values[f"{kind}{name}"]
    for name, value in of_stage.items():
        if name.startswith(GROUPS):
            number, _, key = name.removeprefix(GROUPS).partition("].")
            optimizer.param_groups[int(number)][key] = value
        elif name.startswith(STATE):
            optimizer.state[name.removeprefix(STATE)] = value


def names_of_values(text: str, *, ignored: bool = False) -> list[str]:
    """Return the names of a stage's saved values that are restored.

    With ``ignored`` return the others, which only version 0.3.8 saved.
    """
    names = [str(name) for name, _ in json.loads(text)["values"]["dict"]]
    return [name for name in names if name.startswith((GROUPS, STATE, ENTRY)) != ignored]


def _of_stage(where: str, groups: list[list[str]], metadata: Mapping[str, str]) -> list[str]:
    """Return the metadata key of the saved stage with ``groups``, in a list.

    The list is empty if no saved stage has these groups. Raise CheckpointError if some of their parameters have values
    that a different stage saved.
    """
    saved = {key: json.loads(text)["groups"] for key, text in metadata.items() if key.startswith(OF_STAGE)}
    if same := [key for key, theirs in saved.items() if theirs == groups]:
        return same[:1]
    here = {name for group in groups for name in group}
    for key, theirs in saved.items():
        if (names := names_of_values(metadata[key])) and any(here.intersection(group) for group in theirs):
            raise CheckpointError(
                f"{where} holds values that an optimizer keeps for all parameters of a stage ({', '.join(names[:3])}), "
                "and the model is cut differently now; resume with the partition that it was made with, or start a new "
                "run with init_from= in another run_dir"
            )
    return []


def _parameters(learner: Learner, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return parameters by all their names, with the first names first."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # The cut decides under which of its names the state of a parameter was saved.
    named = *learner.named_parameters(), *learner.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if id(p) in held}


def _groups(optimizer: Optimizer, parameters: dict[str, Tensor]) -> list[list[str]]:
    """Return, for each group, the first names of its parameters."""
    first = {id(p): name for name, p in reversed(parameters.items())}
    return [[first[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _stage_values(learner: Learner, optimizer: Optimizer) -> dict[str, Any]:
    """Return by name the values to save that belong to no single parameter."""
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

    def are_equal(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other))

    (ones, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind == other_kind and all(map(are_equal, ones, others))


def _device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters.values()), CPU)
