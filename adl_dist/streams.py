"""The global random streams of this process."""

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")


def seed_streams(seed: int, device: torch.device = CPU) -> None:
    """Seed the random streams of torch, Python and numpy."""
    seed_each(dict.fromkeys(("torch", "python", "numpy"), seed), device)


def seed_each(seeds: Mapping[str, int], device: torch.device = CPU) -> None:
    """Seed the streams in ``seeds``, by the names torch, python and numpy."""
    if (seed := seeds.get("torch")) is not None:
        seed_torch(seed, device)
    if (seed := seeds.get("python")) is not None:
        random.seed(seed)
    if (seed := seeds.get("numpy")) is not None:
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # the legacy stream takes words of 32 bits


def seed_torch(seed: int, device: torch.device = CPU) -> None:
    """Seed torch's streams on the CPU and on ``device``."""
    # A model on a GPU may draw from both.
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class Streams:
    """A copy of the states of torch's, Python's and numpy's random streams.

    It may include torch's stream of one GPU.
    """

    def __init__(self, device: torch.device | None = None, *, only_torch: bool = False) -> None:
        """Copy the states, with torch's stream of ``device`` if it is a GPU.

        With ``only_torch`` copy only torch's, in 1 us instead of 30; such a copy cannot be restored.
        """
        self._device = device if device is not None and device.type == "cuda" else None
        self._torchs = torch.get_rng_state()
        self._pythons = None if only_torch else random.getstate()
        self._numpys: Any = None if only_torch else np.random.get_state(legacy=False)  # of whatever generator is set
        self._of_device = torch.cuda.get_rng_state(self._device) if self._device is not None else None

    def difference(self, before: "Streams") -> set[str]:
        """Return the names of streams with a different state than ``before``."""
        pairs = {
            "torch": (self._of_torch, before._of_torch),
            "python": (self._pythons, before._pythons),
            "numpy": (pickle.dumps(self._numpys), pickle.dumps(before._numpys)),
        }
        return {name for name, (now, then) in pairs.items() if now != then}

    @cached_property
    def _of_torch(self) -> list[bytes]:
        states = self._torchs, self._of_device
        return [state.numpy().tobytes() for state in states if state is not None]

    def moved(self) -> set[str]:
        """Return the names of streams drawn from or seeded since this copy."""
        return Streams(self._device).difference(self)

    def restore(self) -> None:
        """Restore the states of all streams."""
        torch.set_rng_state(self._torchs)
        assert self._pythons is not None
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)
        if self._device is not None and self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)


@contextmanager
def streams_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global random streams, also of ``device``, after the block."""
    streams = Streams(device)
    try:
        yield
    finally:
        streams.restore()
