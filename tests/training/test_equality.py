"""The values of a run, all stages in one process: against the equations, against plain torch, in any order."""

import random

import pytest
import torch

from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, differ, plain_loop, run
from tests.support.runs import nan_inputs, pick, sgd, train
from tests.support.tied import TIED_BALANCE, tied_net
from tests.support.tiers import slow
from tests.support.toys import batch_norm_net


@pytest.mark.parametrize("M", [1, 2, 3, 4])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_k_stages_follow_the_equations_of_the_paper_to_1e_12(K, M):
    assert_close(run(K, M, "adl"), by_the_equations(K, M, None, "stash"))


@pytest.mark.parametrize(
    ("M", "dtype", "clip_norm"), [(1, torch.float32, None), (3, torch.float64, None), (1, torch.float32, 0.3)]
)
def test_one_stage_equals_a_plain_torch_loop_bit_for_bit(M, dtype, clip_norm):
    model = batch_norm_net().to(dtype)
    expected = plain_loop(model, sgd(model.parameters()), M=M, dtype=dtype, clip_norm=clip_norm)
    state, _ = train(1, M, dtype, clip_norm=clip_norm, verify=True)
    assert_same(state, expected)


@pytest.mark.parametrize("K", [2, 3, 4])
def test_staleness_changes_the_values(K):
    """The equality tests would pass for a synchronous pipeline if it did not."""
    assert differ(run(K, 2, "adl"), run(1, 2, "adl")) > 1e-3


ORDERS = {
    "stash": (4, {"dropout": 0.3}),
    "latest": (4, {"options": {"weights": "latest"}, "dropout": 0.3}),
    "split": (4, {"options": {"split_backward": True, "delay": "third"}, "dropout": 0.3}),
    "coded": (3, {"codec": "int4"}),
    "skipped": (3, {"codec": "bf16", "non_finite": "skip", "plant": nan_inputs}),
    "tied": (4, {"model": tied_net, "balance": TIED_BALANCE[4]}),
}


@pytest.mark.parametrize("num_orders", [1, slow(40)])
@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_events_does_not_change_a_bit(case, num_orders):
    """Random interleavings of real tensors; see test_engine.py for thousands without."""
    K, options = ORDERS[case]
    expected, _ = train(K, 2, torch.float32, epochs=1, **options)
    for seed in range(num_orders):
        with pick(random.Random(seed).choice):
            assert_same(train(K, 2, torch.float32, epochs=1, **options)[0], expected)
