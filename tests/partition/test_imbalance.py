"""The reason for an uneven cut is what prevents a better one, and is given for uneven cuts only."""

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.partition.imbalance import is_uneven, why_uneven
from tests.support.values import QUIET

NAMES, TIED = ["wte", "h.0", "h.1", "head"], "'wte' and 'head' are one"


@pytest.mark.parametrize(
    ("loads", "uneven"),
    [([1.0], False), ([0.32, 0.52], False), ([0.13, 0.92], True), ([0.0, 0.84], True), ([1, 1, 1, 9], True)],
)
def test_a_cut_is_uneven_if_stages_add_less_than_a_quarter(loads, uneven):
    assert is_uneven(loads) == uneven


STAGE_1, STAGE_1_OF_4 = "stage 1 (head) has 90% of the work", "stage 1 (h.0 .. head) has 90% of the work"


@pytest.mark.parametrize(
    ("reasons", "sizes", "loads", "told"),
    [
        (["", TIED, TIED, ""], [1, 3], [1, 9], f"{STAGE_1_OF_4}, since it can be cut nowhere: {TIED}"),
        (["", TIED, "", ""], [1, 3], [1, 9], f"{STAGE_1_OF_4}, since it can be cut in 1 of 2 places only: {TIED}"),
        (["", "", "", ""], [3, 1], [1, 9], f"{STAGE_1}, since it is one unit"),
        (["", "", "", ""], [1, 3], [1, 9], f"{STAGE_1_OF_4}, since the links are too slow"),
        (["", TIED, TIED, ""], [1, 3], [4, 6], None),
    ],
)
def test_the_reason_is_what_forbids_cuts_in_the_heavy_stage(reasons, sizes, loads, told):
    why = why_uneven(NAMES, reasons, sizes, loads)
    assert why is None if told is None else why.startswith(told)


def tied_but_for_the_first():
    first, *more = (nn.Linear(512, 512) for _ in range(8))  # so wide that they take longer whatever else runs
    more[-1].weight = first.weight
    return nn.Sequential(nn.Linear(4, 512), first, *more)


@pytest.mark.parametrize("balance", ["even", "auto", [1, 8]])
def test_a_cut_that_leaves_all_to_one_stage_is_warned_of_once(balance, capsys):
    data = torch.utils.data.TensorDataset(torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64))
    trainer = adl_dist.Trainer(
        tied_but_for_the_first(),
        **{"loss_fn": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "num_stages": 2},
        method=adl_dist.method("adl", accumulation_steps=1, lr_clock="global"),  # its stages cannot share a weight
        partition=adl_dist.PartitionSpec(balance=balance, granularity="block"),
    )
    trainer.fit(data, epochs=1, batch_size=8, monitoring=QUIET)
    err = capsys.readouterr().err
    told = "warning: stage 1 (1 .. 8) has" in err and "'1.weight' is used on both sides of it" in err
    assert told == (balance in ("even", "auto")), "a cut that was asked for by numbers needs no word"
    assert err.count("\n") == int(told)
