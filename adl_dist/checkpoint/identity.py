"""Identity of a run that continues: its sizes, its cut and its objects.

A script has no settings that could be compared, only objects. Recorded are the names of their classes and functions,
and the options of the optimizer's groups.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from torch.optim import Optimizer

from adl_dist.checkpoint.nested import PLAIN
from adl_dist.errors import CheckpointError
from adl_dist.schedule.run_plan import Plan


def described_optimizer(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return lists by key: an optimizer's class name and its group values."""
    named: dict[str, list[Any]] = {"name": [class_name(type(optimizer))]}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                named.setdefault(key, []).append(plain(value))
    return named


def merged(descriptions: Iterable[Mapping[str, list[Any]]]) -> dict[str, Any]:
    """Merge the values of all stages by key: one, or a list if they differ."""
    found: dict[str, dict[str, Any]] = {}
    for description in descriptions:
        for key, values in description.items():
            found.setdefault(key, {}).update((json.dumps(value, sort_keys=True), value) for value in values)
    lists = {key: [values[text] for text in sorted(values)] for key, values in found.items()}
    return {key: values[0] if len(values) == 1 else values for key, values in lists.items()}


def plain(value: Any) -> Any:
    """Return an option of an optimizer in a form that YAML can hold."""
    if hasattr(value, "tolist"):  # a tensor, or a number of numpy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if type(value) in PLAIN else {"name": class_name(value)}


def class_name(thing: Any) -> str:
    """Return the qualified name of a class, a function or an object's class."""
    while isinstance(thing, partial):
        thing = thing.func
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    if name.endswith("<lambda>"):
        return "<lambda>"
    # The name of a script's module depends on how the script is started.
    is_named = getattr(thing, "__module__", None) not in (None, "__main__", "builtins")
    return f"{thing.__module__}.{name}" if is_named else str(name)


def optimizer_name(made: Mapping[str, Any]) -> str:
    """Return the optimizer class in :func:`merged` settings, or empty text."""
    names = (made["optimizer"] or {}).get("name", [])
    return ", ".join(name.rpartition(".")[2] for name in ([names] if isinstance(names, str) else names))


def identity_of(plan: Plan, optimizer: str) -> dict[str, Any]:
    """Return the values that identify a run; only its length may change."""
    names = "num_samples", "micro_batch_size", "accumulation_steps", "total_updates"
    return {**{name: getattr(plan, name) for name in names}, "optimizer": optimizer}


def check_identity(path: PurePath, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """Raise CheckpointError if the runs differ; return a note on a new length."""
    for name, value in mine.items():
        if name != "total_updates" and theirs.get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: {name} is {theirs.get(name)} there and {value} here; give the run's own "
                "data, batch size and optimizer, or start a new run in another run_dir (init_from= takes its weights)"
            )
    if theirs.get("total_updates") == mine["total_updates"]:
        return None
    return (
        f"the run is now {mine['total_updates']} updates long, not {theirs.get('total_updates')}; a learning rate "
        "schedule that depends on it follows the new length"
    )


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
