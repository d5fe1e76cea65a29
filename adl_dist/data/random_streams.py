"""The process's global random streams, which transforms draw from: seeded for a sample, and left as they were."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Takes the place of numpy's generator while samples are loaded: to copy a state out and in would take 70 us.
_FOR_SAMPLES = np.random.MT19937(0)


@contextmanager
def streams_restored() -> Iterator[None]:
    """Leave the process's streams as they were found; CUDA's are not touched at all."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpys_own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(_FOR_SAMPLES)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_bit_generator(numpys_own)  # type: ignore[attr-defined]


@contextmanager
def gaussian_kept() -> Iterator[None]:
    """Leave numpy the second half of a pair of Gaussians, which it drops when its generator is changed.

    Unless another one has drawn meanwhile: then it would come in the wrong place.
    """
    before = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        now = np.random.get_state(legacy=False)
        if before["has_gauss"] and pickle.dumps(before["state"]) == pickle.dumps(now["state"]):
            np.random.set_state(before)


def seed_streams(seed: int) -> None:
    """Seed all of them; CUDA's not."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # takes words of 32 bits
