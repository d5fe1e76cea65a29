"""Random generators that a dataset keeps for itself, which nothing seeds for a sample and no resume puts back."""

import copy
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from adl_dist.data.stream import is_iterable
from adl_dist.partition.state_walk import PLAIN, generator_access
from adl_dist.report import warn
from adl_dist.streams import streams_kept

DEPTH = 6  # of attributes and containers in each other
MOST_ELEMENTS = 1000  # a longer container holds data
DATA = (*PLAIN, Tensor, np.ndarray)


def note_own_generators(dataset: Any, *, resumable: bool, num_workers: int) -> None:
    """Warn of generators that samples of ``dataset`` draw from, if a run in processes or a continued one would differ.

    ``resumable``: whether it may be continued; ``num_workers``: processes that load, of which each has a copy.
    """
    if is_iterable(dataset) or not (resumable or num_workers) or not (drawn := drawn_from(dataset)):
        return
    of_workers = f"each of the {num_workers} processes that load begins with the same draws" if num_workers else ""
    of_resume = "a resume does not put it back" if resumable else ""
    warn(
        f"the training dataset draws from a generator of its own ('{drawn[0]}'): "
        f"{'; '.join(filter(None, (of_workers, of_resume)))}; draw from the global stream of torch, Python or numpy, "
        "which is seeded for each sample"
    )


def drawn_from(dataset: Any) -> list[str]:
    """Return the names of the generators in ``dataset`` that a sample of it draws from; they are put back."""
    found = [(name, *access) for name, access in _generators(dataset, "", DEPTH, {})]
    if not found:
        return []
    states = [[copy.deepcopy(get()) for _, get, _ in found]]
    for _ in range(2):
        with streams_kept(), suppress(Exception):  # if it cannot be loaded, the loader will say so
            dataset[0]
        states.append([copy.deepcopy(get()) for _, get, _ in found])
    for (_, _, put), state in zip(found, states[0], strict=True):
        put(state)
    # A sample that seeds it leaves it as it did before.
    names = (name for name, _, _ in found)
    return [name for name, first, second in zip(names, *states[1:], strict=True) if repr(first) != repr(second)]


def _may_hold_some(values: Collection[Any]) -> bool:
    """Return whether these are no data: few, and the first of them is no number, text or tensor."""
    return 0 < len(values) <= MOST_ELEMENTS and not isinstance(next(iter(values)), DATA)


def _generators(value: Any, name: str, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield, for each generator that ``value`` reaches, its name and how its state is read and set."""
    if isinstance(value, (*DATA, type)) or depth < 0 or id(value) in seen:
        return
    seen[id(value)] = value
    if (access := generator_access(value)) is not None:
        yield name, access
    elif isinstance(value, dict) and _may_hold_some(value.values()):
        for key, each in value.items():
            yield from _generators(each, f"{name}[{key!r}]", depth - 1, seen)
    elif isinstance(value, list | tuple) and _may_hold_some(value):
        for place, each in enumerate(value):
            yield from _generators(each, f"{name}[{place}]", depth - 1, seen)
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        for key, each in held.items():
            yield from _generators(each, f"{name}.{key}".lstrip("."), depth - 1, seen)
