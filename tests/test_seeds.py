"""The streams of a run: numpy's SeedSequence, taken apart by us for speed."""

import random
import zlib

import numpy as np

from adl_dist.seeds import stream_seed, stream_seeds


def test_a_stream_is_that_of_numpys_seed_sequence():
    draw = random.Random(0)
    numbers = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
    for _ in range(2000):
        seed, purpose = draw.choice(numbers), draw.choice(["order", "sample", "dropout"])
        indices = [draw.choice([*numbers, draw.getrandbits(20)]) for _ in range(draw.randint(0, 4))]
        sequence = np.random.SeedSequence((seed, zlib.crc32(purpose.encode()), *indices))
        assert stream_seed(seed, purpose, *indices) == int(sequence.generate_state(1, np.uint64)[0]) >> 1


def test_many_seeds_at_once_are_those_of_each_stream():
    draw = random.Random(1)
    for _ in range(300):
        seed, indices = draw.choice([0, 5, 2**32, 2**63 - 1]), [draw.choice([0, 7, 2**33])] * draw.randint(0, 3)
        last = [0, 1, 2**32 - 1, draw.getrandbits(32)]
        expected = [stream_seed(seed, "dropout", *indices, index) for index in last]
        assert stream_seeds(seed, "dropout", *indices, last=last).tolist() == expected
