"""Independent random streams of one seed, also for data. No torch."""

import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
POOL = 4  # words of a SeedSequence's state


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """Derive the seed of one random stream, in [0, 2**63).

    A new stream does not change any other stream.

    Args:
        seed: the run's seed, >= 0.
        purpose: the use of the stream, for example ``"dropout"``.
        indices: >= 0; the number of the stream among those of this purpose, for example (epoch, sample).
    """
    words = [word for number in (seed, _number_of(purpose), *indices) for word in _words(number)]
    # An array of its words takes half the time of a list of numbers, and there is a stream for every sample.
    low, high = np.random.SeedSequence(np.array(words, dtype=np.uint32)).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


def weights_seed(seed: int, name: str) -> int:
    """Return the seed of the weights ``name``, the same for any cut."""
    return stream_seed(seed, "weights", _number_of(name))


def stream_seeds(seed: int, purpose: str, *indices: int, last: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return :func:`stream_seed` [n] for n values ``last`` of the last index."""
    # SeedSequence's mixing (numpy/random/bit_generator.pyx), each word of entropy a column with a row per stream.
    words = [np.full(1, word, np.uint32) for number in (seed, _number_of(purpose), *indices) for word in _words(number)]
    words.append(np.asarray(last, np.uint32))
    words += [np.zeros(1, np.uint32)] * (POOL - len(words))
    of_pool, of_state = _constants(0x43B0D7E5, 0x931E8875), _constants(0x8B51F9DD, 0x58F38DED)

    def mixed(into: Words, word: Words) -> Words:
        into = into * np.uint32(0xCA01F9DD) - _scrambled(word, of_pool) * np.uint32(0x4973F715)
        return into ^ into >> np.uint32(16)

    pool = [_scrambled(word, of_pool) for word in words[:POOL]]
    for source in range(POOL):
        for place in range(POOL):
            if place != source:
                pool[place] = mixed(pool[place], pool[source])
    for word in words[POOL:]:
        pool = [mixed(into, word) for into in pool]
    low, high = (_scrambled(word, of_state).astype(np.uint64) for word in pool[:2])
    seeds: NDArray[np.uint64] = (high << np.uint64(32) | low) >> np.uint64(1)
    return seeds


def _constants(first: int, factor: int) -> Iterator[tuple[np.uint32, np.uint32]]:
    powers = accumulate(repeat(factor), lambda a, b: a * b & 0xFFFFFFFF, initial=first)
    return pairwise(map(np.uint32, powers))


def _scrambled(word: Words, constants: Iterator[tuple[np.uint32, np.uint32]]) -> Words:
    before, behind = next(constants)
    word = (word ^ before) * behind
    return word ^ word >> np.uint32(16)


@cache
def _number_of(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


def _words(number: int) -> list[int]:
    """Split a number into words of 32 bits, as SeedSequence does."""
    if number < 1 << 32:
        return [number]
    return [number & 0xFFFFFFFF, *_words(number >> 32)]
