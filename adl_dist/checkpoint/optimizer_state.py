"""The memory of the stages' optimizers in a checkpoint.

Of each parameter, in any cut under its name: all that the optimizer remembers of it, and that ``method.mitigation``
does. Of each stage: what has moved since its optimizer was made, in ``param_groups``, in attributes of the object, in
``state`` under a name, or in what hooks of its step keep.
These are one stage's, so they come back only where the cut is the same. What the learning rate schedule sets is not
stored: it is a function of the update index.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from adl_dist.checkpoint import closures, nested, storage
from adl_dist.checkpoint.closures import Mark, Place
from adl_dist.checkpoint.nested import Packer, Unstorable
from adl_dist.checkpoint.storage import Shard, Stored
from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.stage import Learner

# What names of metadata begin with; no name of a module has a colon.
OF_PARAMETER, OF_STAGE, OF_MITIGATION = "parameter:", "optimizer:", "mitigation:"
A_PARAMETER = "the parameter "  # begins a name, where parameters stand for themselves
# Attributes that torch gives an optimizer itself, besides hooks; of these some move, and say nothing about the run.
OF_TORCH = {
    *("defaults", "state", "param_groups", "step", "profile_hook_step"),
    *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    *("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"),
}


@dataclass(frozen=True)
class FreshOptimizer:
    """What a stage's optimizer was when the run began, and which keys of its groups the schedule sets.

    ``names`` are all names of each parameter, by group; the first one is that of its state.
    """

    names: Sequence[Sequence[Sequence[str]]]
    marks: Mapping[str, Mark]
    scheduled: Collection[str]

    @classmethod
    def of(cls, learner: Learner, scheduled: Collection[str] = ()) -> "FreshOptimizer":
        """Look at the optimizer of ``learner``, which has made no step and has its schedule."""
        assert learner.optimizer is not None
        names: dict[int, list[str]] = {}
        # The cut decides under which of its names the state of a parameter was saved.
        for name, parameter in (*learner.named_parameters(), *learner.named_parameters(remove_duplicate=False)):
            if name not in (known := names.setdefault(id(parameter), [])):
                known.append(name)
        groups = [[names.get(id(p), [""]) for p in group["params"]] for group in learner.optimizer.param_groups]
        marks = {name: _mark(name, home[key]) for name, (home, key) in _values_of(learner.optimizer)}
        return cls(groups, marks, scheduled)

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [[names[0] for names in group] for group in self.names]

    def parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the parameters of ``optimizer`` by all their names."""
        pairs = zip(self.names, optimizer.param_groups, strict=False)
        return {
            name: parameter
            for group, of in pairs
            for names, parameter in zip(group, of["params"], strict=False)
            for name in names
        }

    def moved(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the values of groups, object and stage that are others now, by name.

        And tensors that the object holds, moved or not: they may be copies of the weights that it began with.
        """
        values = {name: home[key] for name, (home, key) in _values_of(optimizer, without=self.scheduled)}
        return {
            name: value
            for name, value in values.items()
            if _has_moved(name, self.marks.get(name), value) or (name.startswith("self.") and _is_of_tensors(value))
        }


def shard_of(learner: Learner, fresh: FreshOptimizer | None) -> Shard:
    """Return all that the optimizer of ``learner`` remembers; ``fresh``: as it was, None: it has none.

    Raises:
        ConfigError: a part of it cannot be saved.
    """
    if learner.optimizer is None or fresh is None:
        return Shard({})
    parameters = fresh.parameters(learner.optimizer)
    names = {parameter: name for name, parameter in reversed(parameters.items())}  # the first of several
    packer = Packer({f"{A_PARAMETER}{name}": p for p, name in names.items()}, _device_of(parameters))
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
        if moved := fresh.moved(learner.optimizer):
            for name in moved:
                if name.startswith(closures.HOOK) and name not in fresh.marks:
                    raise Unstorable(f"{name} is new since the run began; give it a value before the first step")
            place = f"{OF_STAGE}{learner.key}"
            metadata[place] = json.dumps({"groups": fresh.groups, "values": packer.packed(place, moved)})
    except Unstorable as error:
        raise _unstorable(learner, str(error).removeprefix(f"{OF_STAGE}{learner.key}.")) from None
    return Shard(packer.tensors, metadata)


def refuse_inner(learner: Learner) -> None:
    """Refuse an optimizer that steps another one, whose state would be lost.

    Raises:
        ConfigError: names it.
    """
    if learner.optimizer is None:
        return
    for name, (home, key) in _values_of(learner.optimizer):
        if (inner := _optimizer_in(home[key])) is not None:
            raise _unstorable(learner, f"{name} is a {type(inner).__name__}, an optimizer in an optimizer")


def restore(
    where: str,
    learner: Learner,
    fresh: FreshOptimizer | None,
    tensors: Mapping[str, Stored],
    metadata: Mapping[str, str],
) -> None:
    """Give the optimizer of ``learner`` what was saved ``where`` for its parameters, in any cut, and for the stage.

    Not by its ``load_state_dict``, which turns ints into tensors and gives tensors the dtype of their parameter.

    Raises:
        CheckpointError: values of a stage were saved, and no stage had the parameters that this one has.
    """
    if learner.optimizer is None or fresh is None:
        return
    parameters = fresh.parameters(learner.optimizer)
    kept = ((name, metadata[key]) for name in parameters if (key := f"{OF_PARAMETER}{name}") in metadata)
    states = {name: json.loads(text) for name, text in kept}
    # A stage that has become fresh has no use for what was remembered of its parameters; one that has become stale
    # begins to remember.
    used = parameters if learner.mitigation is not None else ()
    pasts = {name: json.loads(metadata[key]) for name in used if (key := f"{OF_MITIGATION}{name}") in metadata}
    values = _values_for(where, fresh.groups, metadata)
    names = {*nested.tensor_names([*states.values(), *pasts.values(), values])}
    read = dict(storage.read({name: tensors[name] for name in names}))
    place = partial(
        nested.unpacked,
        tensors=read,
        device=_device_of(parameters),
        steps_on_cpu=_steps_on_cpu(learner.optimizer),
        own={f"{A_PARAMETER}{name}": parameter for name, parameter in parameters.items()},
    )
    for name, packed in states.items():
        learner.optimizer.state[parameters[name]] = place(packed)
    for name, packed in pasts.items():
        assert learner.mitigation is not None
        learner.mitigation.history[parameters[name]] = place(packed)
    for name, value in place(values).items():
        _put(learner.optimizer, name, value)


def _values_of(optimizer: Optimizer, *, without: Collection[str] = ()) -> Iterator[tuple[str, Place]]:
    """Yield the place of what an optimizer holds for all its parameters, by a name; of groups ``without`` some keys."""
    for number, group in enumerate(optimizer.param_groups):
        for key in group:
            if key != "params" and key not in without:
                yield f"param_groups[{number}].{key}", (group, key)
    for key in vars(optimizer):
        if key not in OF_TORCH and not key.startswith("_optimizer_"):
            yield f"self.{key}", (vars(optimizer), key)
    state: dict[Any, Any] = optimizer.state
    yield from ((f"state.{key}", (state, key)) for key in state if isinstance(key, str))
    seen = set[int]()  # two hooks may share a variable
    for name, hook in closures.hooks_of(optimizer):
        for full, (home, key) in closures.places(name, hook, seen):
            if home[key] is not optimizer:
                yield full, (home, key)


def _is_of_tensors(value: Any) -> bool:
    """Return whether ``value`` is a tensor, but no parameter, or a container of such, next to plain values."""
    leaves = tree_leaves(value)
    of_plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves)
    return (
        of_plain
        and any(isinstance(leaf, Tensor) for leaf in leaves)
        and not any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    )


def _optimizer_in(value: Any) -> Optimizer | None:
    """Return an optimizer that ``value`` is, or holds in containers."""
    if isinstance(value, Optimizer):
        return value
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((inner for one in held if (inner := _optimizer_in(one)) is not None), None)


def _unstorable(learner: Learner, said: str) -> ConfigError:
    return ConfigError(
        f"{learner.where}: what {type(learner.optimizer).__name__} remembers cannot be saved: {said}. Without it a "
        "resumed run would differ; choose another optimizer, or train without run_dir"
    )


def _mark(name: str, value: Any) -> Mark:
    return closures.mark(value) if name.startswith(closures.HOOK) else nested.mark(value)


def _has_moved(name: str, before: Mark | None, value: Any) -> bool:
    return closures.has_moved(before, value) if name.startswith(closures.HOOK) else before != nested.mark(value)


def _put(optimizer: Optimizer, name: str, value: Any) -> None:
    kind, _, key = name.partition(".")
    if kind == "self":
        setattr(optimizer, key, value)
    elif kind == "state":
        optimizer.state[key] = value  # type: ignore[index]
    elif kind == "hook":
        closures.put(dict(_values_of(optimizer))[name], value)
    else:
        optimizer.param_groups[int(kind.removeprefix("param_groups[").removesuffix("]"))][key] = value


def _values_for(where: str, groups: list[list[str]], metadata: Mapping[str, str]) -> Any:
    """Return the packed values of the stage that had the parameters named in ``groups``."""
    saved = [json.loads(text) for name, text in metadata.items() if name.startswith(OF_STAGE)]
    for one in saved:
        if one["groups"] == groups:
            return one["values"]
    here = {name for group in groups for name in group}
    for one in saved:
        if any(name in here for group in one["groups"] for name in group):
            names = ", ".join(str(key) for key, _ in one["values"]["dict"][:3])
            raise CheckpointError(
                f"{where} holds values that an optimizer keeps for all parameters of a stage ({names}), and the model "
                "is cut differently now; resume with the partition that it was made with, or start a new run with "
                "init_from= in another run_dir"
            )
    return {"dict": []}


def _steps_on_cpu(optimizer: Optimizer) -> bool:
    """Whether torch's optimizers keep the counter ``step`` on the CPU."""
    return not any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def _device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
