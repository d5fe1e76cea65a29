"""The global random streams of this process, compared and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Streams:
    """Torch's stream on the CPU, Python's, numpy's legacy one, and torch's on one GPU, as they are now."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Look at them; ``device``: the GPU whose stream is one of them, None or the CPU: there is none."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._torchs, self._pythons = torch.get_rng_state(), random.getstate()
        self._numpys: Any = np.random.get_state(legacy=False)  # of whatever generator is set
        self._of_device = torch.cuda.get_rng_state(self._device) if self._device is not None else None

    def moved(self) -> set[str]:
        """Return which of ``torch``, on the CPU, ``python`` and ``numpy`` have been drawn from or seeded since then."""
        now = Streams()
        pairs = {
            "torch": (now._torchs.numpy().tobytes(), self._torchs.numpy().tobytes()),
            "python": (now._pythons, self._pythons),
            "numpy": (_as_bytes(now._numpys), _as_bytes(self._numpys)),
        }
        return {name for name, (state, before) in pairs.items() if state != before}

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self._torchs)
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)
        if self._device is not None and self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)


@contextmanager
def streams_kept(device: torch.device | None = None) -> Iterator[Streams]:
    """Leave the global random streams, also that of the GPU ``device``, as they were found."""
    streams = Streams(device)
    try:
        yield streams
    finally:
        streams.restore()


def _as_bytes(state: Any) -> Any:
    """Return the state of a numpy generator in a form that can be compared."""
    if isinstance(state, dict):
        return {key: _as_bytes(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
