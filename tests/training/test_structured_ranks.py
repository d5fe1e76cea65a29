"""Several inputs and lengths that change: K gloo processes against K stages in one process, to the bit."""

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.training.test_structured_batches import fitted

pytestmark = pytest.mark.ranks

CASES = [
    ("tuple", 2, "adl", {}),
    ("lengths by names", 3, "adl", {}),
    ("lengths", 2, "dsp", {}),
    ("lengths", 1, "fr", {}),
    ("lengths", 2, "1f1b", {"split_backward": True}),
]


def train_all(K):
    return [fitted(name, K, M, method, **options)[0] for name, M, method, options in CASES]


def test_processes_train_what_one_process_trains():
    alone, together = train_all(3), run_ranks(3, train_all, 3, timeout_seconds=150)
    for case, expected, *ranks in zip(CASES, alone, *together, strict=True):
        for state in ranks:
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), case
