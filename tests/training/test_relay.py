"""A network whose tensors travel over several stages: K processes against K stages in one process."""

import functools

import pytest
import torch
from torch import nn

import adl_dist
from tests.support.ranks import run_ranks
from tests.support.toys import UNET_BALANCE, FixedImages, unet
from tests.support.values import QUIET

pytestmark = pytest.mark.ranks

K = 4
# In float64 tests/partition/test_linearise.py shows that one process follows the equations.
CASES = [
    ("adl", 2, torch.float64),
    *((method, M, torch.float32) for method, M in (("adl", 1), ("adl", 2), ("bp", 2), ("dsp", 1), ("paci", 2))),
]


def train(method, M, dtype):
    trainer = adl_dist.Trainer(
        unet(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        method=adl_dist.method(method, accumulation_steps=M),
        num_stages=K,
        partition=adl_dist.PartitionSpec(balance=UNET_BALANCE[K]),
        precision=adl_dist.Precision(dtype=dtype),
        processes=adl_dist.ProcessOptions(threads=1, timeout_seconds=30),
    )
    summary = trainer.fit(
        FixedImages(11, dtype=dtype),
        epochs=2,
        batch_size=3 * M,
        val_dataset=FixedImages(7, seed=1, dtype=dtype),
        monitoring=QUIET,
    )
    return trainer.full_state_dict(), summary


def train_all():
    return [train(*case) for case in CASES]


def test_skips_and_masks_through_processes_change_no_bit():
    """Over its cuts go the input itself, a tensor for three stages, booleans, and shapes without a byte."""
    by_rank = run_ranks(K, train_all, timeout_seconds=110)
    for place, case in enumerate(CASES):
        expected, expected_summary = train(*case)
        for rank in range(K):
            state, summary = by_rank[rank][place]
            assert state.keys() == expected.keys()
            for name in expected:
                assert torch.equal(state[name], expected[name]), f"{case}, rank {rank}: {name}"
            for figure in ("validation_loss", "validation_accuracy", "updates"):
                assert summary[figure] == expected_summary[figure], f"{case}, rank {rank}"
