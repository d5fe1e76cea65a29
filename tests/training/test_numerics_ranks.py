"""K gloo processes against K stages in one process, in lower precision: the same bits."""

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.runs import train

pytestmark = pytest.mark.ranks

LOWERED = {"autocast": torch.bfloat16}
NARROW = {"wire_dtype": torch.bfloat16}
CASES = [
    (2, {**NARROW, "dropout": 0.3}),
    (1, {**NARROW, "method": "fr", "channels_last": True}),
    (2, {**LOWERED, **NARROW}),
    (2, {**LOWERED, "dropout": 0.3}),
    (2, {**LOWERED, "channels_last": True}),
    (1, {**LOWERED, "method": "dsp", "dropout": 0.3}),
    (3, {**LOWERED, "method": "2bw"}),
    (2, {**LOWERED, "method": "gpipe", "options": {"recompute": "except_last"}, "dropout": 0.3}),
    (1, {**LOWERED, "method": "dgl", "options": {"head": "predsim"}}),
]


def train_all(K):
    return [train(K, M, torch.float32, **options) for M, options in CASES]


def test_three_processes_in_lower_precision_equal_one():
    by_rank = run_ranks(3, train_all, 3, timeout_seconds=110)
    for case, (M, options) in enumerate(CASES):
        expected, expected_summary = train(3, M, torch.float32, **options)
        for rank in range(3):
            state, summary = by_rank[rank][case]
            for name in expected:
                assert torch.equal(state[name], expected[name]), f"M={M} {options} rank {rank}: {name}"
            assert summary["validation_loss"] == expected_summary["validation_loss"]
