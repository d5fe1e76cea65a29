"""What a checkpoint holds of a stage, by names that do not depend on the cut.

model.<name>               parameters and buffers, by the uncut model's names
optimizer.<name>.<state>   what the optimizer remembers of a parameter
head<k>:<name>             tensors of the head of a local loss, which is a stage's own
head<k>:after:<unit>       tells by its name where in the model that head stands
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from adl_dist.errors import CheckpointError
from adl_dist.stage import Stage

PLACE = "after:"

Entry = TypeVar("Entry")


def saved(stage: Stage) -> dict[str, Tensor]:
    """All that is to be saved of ``stage``; the tensors are its own."""
    state = _tensors(stage) | _optimizer_state(stage)
    if stage.head is not None:
        state[f"{stage.head_prefix}{PLACE}{_end_of(stage)}"] = torch.zeros(())  # what it tells is its name
    return state


def wanted(stages: Iterable[Stage], stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """What to fill from a checkpoint: the stages' own tensors, and new ones for what their optimizers remembered.

    Args:
        stages: of this process.
        stored: ``size`` and ``properties.dtype`` of each tensor of the checkpoint, by its key.
    """
    state: dict[str, Tensor] = {}
    remembered = _by_parameter(stored)
    for stage in stages:
        state |= _tensors(stage)
        for name in (name for names in _names_of_parameters(stage).values() for name in names):
            for key, entry in remembered.get(name, {}).items():
                state[f"optimizer.{name}.{key}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return state


def restore_optimizers(stages: Iterable[Stage], state: Mapping[str, Tensor]) -> None:
    """Give the optimizers what they remembered, wherever their parameters are now."""
    remembered = _by_parameter(state)
    for stage in stages:
        if stage.optimizer is None:
            continue
        names = _names_of_parameters(stage)
        restored: dict[int, dict[str, Tensor]] = {}
        for place, parameter in enumerate(p for group in stage.optimizer.param_groups for p in group["params"]):
            kept = {key: value for name in names[id(parameter)] for key, value in remembered.get(name, {}).items()}
            if kept:
                restored[place] = kept
        # torch knows which state belongs on which device, and which counters stay on the CPU.
        groups = stage.optimizer.state_dict()["param_groups"]
        stage.optimizer.load_state_dict({"state": restored, "param_groups": groups})


def check_heads(path: Path, stages: Sequence[Stage], stored: Mapping[str, Any]) -> None:
    """Refuse heads of another kind, and those that stood elsewhere, which may well have the same shapes.

    Raises:
        CheckpointError: names the first that does not fit.
    """
    misfits = []
    for name, tensor in ((name, tensor) for stage in stages for name, tensor in _tensors_of_head(stage).items()):
        if name not in stored or stored[name].size != tensor.shape:
            misfits.append(f"{name} does not fit")
    for stage in (stage for stage in stages if stage.head is not None):
        told, here = f"{stage.head_prefix}{PLACE}", _end_of(stage)
        there = next((name.removeprefix(told) for name in stored if name.startswith(told)), here)
        if there != here:
            misfits.append(f"{stage.head_prefix} stood after {there}, and would now stand after {here}")
    if misfits:
        raise CheckpointError(
            f"{path} holds local losses of another cut or head ({misfits[0]}); go on with the partition and "
            "method.head that it was made with, or start anew with init_from= in another run_dir"
        )


def _tensors(stage: Stage) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in stage.module.state_dict().items()} | _tensors_of_head(stage)


def _tensors_of_head(stage: Stage) -> dict[str, Tensor]:
    state = stage.head.state_dict() if stage.head is not None else {}
    return {f"{stage.head_prefix}{name}": tensor for name, tensor in state.items()}


def _end_of(stage: Stage) -> str:
    """The unit of the uncut model that a head comes after."""
    modules = [name for name, _ in stage.module.named_modules(remove_duplicate=False)]
    # The stage of a traced model tells its units, some of which are no modules.
    units: list[str] = getattr(stage.module, "unit_names", modules)
    return units[-1]


def _optimizer_state(stage: Stage) -> dict[str, Tensor]:
    if stage.optimizer is None:
        return {}
    return {
        f"optimizer.{name}.{key}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, parameter in stage.named_parameters()
        for key, value in stage.optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _names_of_parameters(stage: Stage) -> dict[int, list[str]]:
    """All names of each parameter, by its id. Under which of them its state was saved depends on the cut."""
    names: dict[int, list[str]] = {}
    for name, parameter in (*stage.named_parameters(), *stage.module.named_parameters(remove_duplicate=False)):
        names.setdefault(id(parameter), []).append(name)
    return names


def _by_parameter(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Those of ``entries`` that are optimizer state, by the name of the parameter and of the state."""
    found: dict[str, dict[str, Entry]] = {}
    for key, entry in entries.items():
        if key.startswith("optimizer."):
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, {})[state] = entry
    return found
