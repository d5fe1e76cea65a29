"""Random generators that a dataset keeps: they move from sample to sample, and no resume puts them back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

DEPTH = 6  # of attributes and containers in each other
MOST_ELEMENTS = 1000  # a longer container holds data


@contextmanager
def generators_watched(dataset: Any) -> Iterator[list[str]]:
    """Yield a list that holds at the end the names of the generators in ``dataset`` that were drawn from inside."""
    moved: list[str] = []
    generators = dict(_generators(dataset, "", DEPTH, {}))
    before = {name: _state_of(one) for name, one in generators.items()}
    yield moved
    moved += [name for name, one in generators.items() if _state_of(one) != before[name]]


def _generators(value: Any, name: str, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each generator that ``value``, which is called ``name``, reaches, with its name."""
    if id(value) in seen or depth < 0:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
        yield name, value
    elif isinstance(value, dict) and len(value) <= MOST_ELEMENTS:
        for key, each in value.items():
            yield from _generators(each, f"{name}[{key!r}]", depth - 1, seen)
    elif isinstance(value, list | tuple) and len(value) <= MOST_ELEMENTS:
        for place, each in enumerate(value):
            yield from _generators(each, f"{name}[{place}]", depth - 1, seen)
    elif isinstance(held := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        for key, each in held.items():
            yield from _generators(each, f"{name}.{key}".lstrip("."), depth - 1, seen)


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    return repr({key: str(value) for key, value in bits.state.items()})
