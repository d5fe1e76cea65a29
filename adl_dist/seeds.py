"""Independent random streams of one seed, also for data. No torch."""

import zlib
from functools import cache

import numpy as np


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """Derive the seed of one random stream, in [0, 2**63).

    A new stream never moves another one.

    Args:
        seed: the run's seed, >= 0.
        purpose: what the stream is for, for example ``"dropout"``.
        indices: >= 0; which stream of that purpose, for example epoch and sample.
    """
    words = [word for number in (seed, _number_of(purpose), *indices) for word in _words(number)]
    # An array of its words takes half the time of a list of numbers, and there is a stream for every sample.
    low, high = np.random.SeedSequence(np.array(words, dtype=np.uint32)).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


def weights_seed(seed: int, name: str) -> int:
    """Return the seed of the weights ``name``, the same for any cut."""
    return stream_seed(seed, "weights", _number_of(name))


@cache
def _number_of(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def _words(number: int) -> list[int]:
    """Split a number into words of 32 bits, as SeedSequence does."""
    if number < 1 << 32:
        return [number]
    return [number & 0xFFFFFFFF, *_words(number >> 32)]
