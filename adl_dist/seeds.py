"""One seed, many independent random streams. Pure Python and numpy."""

import zlib

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
    words = (seed, zlib.crc32(purpose.encode()), *indices)
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1
