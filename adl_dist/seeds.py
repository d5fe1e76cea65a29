"""One seed, many independent random streams. Pure Python and numpy."""

import zlib
from functools import cache

import numpy as np


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """Derive the seed of one random stream, so that adding a stream never moves another.

    Args:
        seed: the run's seed, >= 0.
        purpose: what the stream is for, for example ``"dropout"``.
        indices: >= 0; which stream of that purpose, for example epoch and sample.

    Returns:
        An integer in [0, 2**63), fit for ``torch.Generator.manual_seed``.
    """
    words = [word for number in (seed, _number_of(purpose), *indices) for word in _words(number)]
    # An array of its words takes half the time of a list of numbers, and there is a stream for every sample.
    low, high = np.random.SeedSequence(np.array(words, dtype=np.uint32)).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


@cache
def _number_of(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def _words(number: int) -> list[int]:
    """Of 32 bits, the lowest first, as SeedSequence takes numbers apart."""
    if number < 1 << 32:
        return [number]
    return [number & 0xFFFFFFFF, *_words(number >> 32)]
