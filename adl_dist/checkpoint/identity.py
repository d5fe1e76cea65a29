"""Identity of a run that continues: its sizes, its cut and its objects.

A script has no settings that could be compared, only objects. Of these a plain description is kept: classes and
functions by their names, and their plain attributes.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.errors import CheckpointError
from adl_dist.schedule.run_plan import Plan

LONGEST_SHOWN = 200  # characters of a list, and elements of a tensor, that is described by its values, not a checksum
MOST_SHOWN = 16  # modules of a loss whose parts are described, too


def described(thing: object) -> Any:
    """Return plain values that identify a loss function or schedule factory."""
    if isinstance(thing, partial):
        arguments = {"arguments": described(thing.args)} if thing.args else {}
        return {
            "name": class_name(thing.func),
            **arguments,
            **{key: described(one) for key, one in thing.keywords.items()},
        }
    if isinstance(thing, float) and not math.isfinite(thing):
        return str(thing)
    for kind in (bool, int, float, str):
        if isinstance(thing, kind):
            return kind(thing)  # a subclass, as numpy has them, could not be written to config.yaml
    if thing is None:
        return None
    if isinstance(thing, Tensor):
        is_small = thing.numel() <= LONGEST_SHOWN
        return _shortened(thing.tolist()) if is_small else _digest(thing)
    if isinstance(thing, list | tuple):
        return _shortened([described(one) for one in thing])
    if isinstance(thing, dict):
        return {str(key): described(one) for key, one in thing.items()}
    if isinstance(thing, torch.dtype | torch.device):
        return str(thing)
    if hasattr(thing, "__qualname__"):  # a function or a class
        return {"name": class_name(thing)}
    return {"name": class_name(type(thing)), **{key: described(one) for key, one in _settings(thing).items()}}


def described_optimizer(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return the class and group values of a new optimizer, by key."""
    named: dict[str, list[Any]] = {"name": [class_name(type(optimizer))]}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                named.setdefault(key, []).append(described(value))
    return named


def merged(descriptions: Iterable[Mapping[str, list[Any]]]) -> dict[str, Any]:
    """Merge the values of all stages by key: one, or a list if they differ."""
    found: dict[str, dict[str, Any]] = {}
    for description in descriptions:
        for key, values in description.items():
            found.setdefault(key, {}).update((json.dumps(value, sort_keys=True), value) for value in values)
    lists = {key: [values[text] for text in sorted(values)] for key, values in found.items()}
    return {key: values[0] if len(values) == 1 else values for key, values in lists.items()}


def _settings(thing: object) -> dict[str, Any]:
    """Return the public attributes of an object that are plain values."""
    values = {key: value for key, value in getattr(thing, "__dict__", {}).items() if key[0] != "_"}
    if isinstance(thing, nn.Module):
        values.pop("training", None)
        values |= dict(thing.named_buffers(recurse=False))
        if len([*thing.modules()]) <= MOST_SHOWN:  # a loss made of losses, not one that holds a network
            values |= dict(thing.named_children())
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor | nn.Module)


def class_name(thing: Any) -> str:
    """Return the qualified name of a class or function."""
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    if name.endswith("<lambda>"):
        return "<lambda>"
    # The name of a script's module depends on how the script is started.
    is_named = getattr(thing, "__module__", None) not in (None, "__main__", "builtins")
    return f"{thing.__module__}.{name}" if is_named else str(name)


def _digest(tensor: Tensor) -> str:
    """Return a checksum of dtype, shape and values."""
    content = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    values = content.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + values.tobytes()).hexdigest()[:16]


def _shortened(values: Any) -> Any:
    text = json.dumps(values)
    is_short = not isinstance(values, list) or len(text) <= LONGEST_SHOWN
    return values if is_short else hashlib.sha256(text.encode()).hexdigest()[:16]


def optimizer_name(made: Mapping[str, Any]) -> str:
    """Return the optimizer class in :func:`merged` settings, or empty text."""
    names = (made["optimizer"] or {}).get("name", [])
    return ", ".join(name.rpartition(".")[2] for name in ([names] if isinstance(names, str) else names))


def identity_of(plan: Plan, optimizer: str) -> dict[str, Any]:
    """Return the values that must be the same when a run continues."""
    names = "num_samples", "micro_batch_size", "accumulation_steps", "total_updates"
    return {**{name: getattr(plan, name) for name in names}, "optimizer": optimizer}


def check_identity(
    path: PurePath, theirs: Mapping[str, Any], mine: Mapping[str, Any], *, schedule_follows: bool
) -> str | None:
    """Raise CheckpointError if the runs differ; return a note, if any.

    ``schedule_follows``: whether the learning rate schedule depends on the length of the run.
    """
    for name, value in mine.items():
        if name != "total_updates" and theirs.get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: {name} is {theirs.get(name)} there and {value} here; give the run's own "
                "data, batch size and optimizer, or start a new run in another run_dir (init_from= takes its weights)"
            )
    if theirs.get("total_updates") == mine["total_updates"]:
        return None
    note = f"the run is now {mine['total_updates']} updates long, not {theirs.get('total_updates')}"
    return f"{note}; the learning rate schedule, which depends on it, follows the new one" if schedule_follows else note


def partition_change_note(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """Return a note on a changed cut, or None if the cut is the same."""
    differing = [name for name in mine if name in theirs and theirs[name] != mine[name]]
    if not differing:
        return None
    keys = {"begins": "balance"}  # partition.balance takes the names where stages begin
    shown = ", ".join(f"{keys.get(name, name)} was {theirs[name]} and is {mine[name]}" for name in differing)
    return (
        f"the run continues with another cut ({shown}); weights and optimizer state are carried over exactly, but "
        "staleness and dropout streams are now those of the new cut, and values follow them"
    )
