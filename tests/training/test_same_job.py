"""Ranks whose scripts make other objects are refused; on which rank a stage is decides nothing else."""

import functools
import json
import os
import re

import numpy as np
import pytest
import torch
from torch import nn

from adl_dist.errors import AdlError, ConfigError
from adl_dist.training.same_job import attributes_of, check_made, told_of
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT


class Table(nn.Module):
    """Adds a table that is no part of its state, drawn from a generator of no seed."""

    def __init__(self):
        super().__init__()
        self.table = torch.from_numpy(np.random.default_rng().standard_normal(6)).float()

    def forward(self, h):
        return h + self.table


def net(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), middle, nn.Linear(6, 5))


def told(case):
    """Train as one of two ranks; return the error that this rank ends with, or that it has trained."""
    rank = int(os.environ["RANK"])
    options, length = {}, {"epochs": 1}
    model = net(Table() if case == "table" else nn.Dropout(0.1 + 0.1 * rank if case == "dropout" else 0.1))
    if case == "loss":
        options["loss_fn"] = nn.CrossEntropyLoss(label_smoothing=0.1 * rank)
    if case == "rate":
        options["optimizer"] = lambda p: torch.optim.SGD(p, lr=0.1 + 0.1 * rank)
    if case == "schedule":
        options["lr_schedule"] = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1 + rank)
    if case == "length":
        length["epochs"] += rank
    if case == "stage":  # another rate for another stage is no mistake
        options["optimizer"] = lambda p: torch.optim.SGD(p, lr=0.1 if len(p[0]) == 6 else 0.2)
    try:
        toy_trainer(2, model=model, balance=[2, 2], **options).fit(
            FixedImages(8), batch_size=4, monitoring=SILENT, **length
        )
    except AdlError as error:
        return str(error)
    return "trained"


CASES = {
    "table": r"rank \d and rank \d do not compute with the same numbers: '2.table' of the model, next to its weights",
    "dropout": r"rank \d and rank \d were not given the same job: modules.2.p is 0\.\d here and 0\.\d there",
    "loss": r"were not given the same job: loss.label_smoothing is 0.\d here and 0.\d there",
    "rate": r"rank 0 and rank 1 do not train alike: optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1; let all ranks",
    "schedule": r"rank 0 and rank 1 do not train alike: lr_schedule.step_size is 1 on rank 0 and 2 on rank 1",
    "length": r"were not given the same job: epochs is \d here and \d there; start all ranks with one command",
    "stage": "trained",
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_make_other_objects_are_told(case):
    for said in run_ranks(2, told, case):
        assert re.search(CASES[case], said), said


RATE = 0.1


def makes(parameters, momentum=0.9):
    return torch.optim.SGD(parameters, lr=RATE, momentum=momentum)


def test_what_is_told_of_functions():
    found = told_of(makes)
    assert (found["name"], found["RATE"]) == ("makes", 0.1)
    assert "SGD" in found["names"]
    of_a_partial = told_of(functools.partial(makes, momentum=0.5))
    assert (of_a_partial["of"], of_a_partial["with"]) == (found, [{"momentum": 0.5}])
    rates = [told_of(lambda p: torch.optim.SGD(p, lr=0.1)), told_of(lambda p: torch.optim.SGD(p, lr=0.2))]
    assert rates[0] != rates[1]
    assert told_of(nn.CrossEntropyLoss(label_smoothing=0.5)) != told_of(nn.CrossEntropyLoss())


class Notes(nn.Linear):
    """Keeps what is another number on each rank, and one that its forward reads."""

    def __init__(self):
        super().__init__(2, 2)
        self.rank, self.made, self.scale = 3, 1234.5, 0.5

    def forward(self, x):
        return super().forward(x) * self.scale + 0 * self.rank


def test_what_may_differ_between_ranks_is_not_told():
    assert attributes_of(Notes()) == {"the model": {"class": "Notes", "scale": 0.5}}
    rank = 1
    assert "rank" not in told_of(lambda output, target: output.sum() if rank else 0)
    assert told_of(lambda p: torch.optim.SGD(p, lr=0.1 + rank), with_rank=True)["rank"] == 1


@pytest.mark.parametrize(
    "weight", [torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()]
)
def test_a_loss_may_name_any_tensor(weight):
    json.dumps(told_of(lambda output, target: (output * weight).sum()))


def test_what_is_told_of_modules():
    attributes = attributes_of(net(nn.Hardtanh(-1, 2)))
    assert attributes["2"] == {"class": "Hardtanh", "min_val": -1, "max_val": 2, "inplace": False}
    assert attributes["1"] == {"class": "Linear", "in_features": 72, "out_features": 6}


def test_what_stages_make_may_differ_if_one_function_made_it():
    made = [[{"optimizer": {"name": ["SGD"], "lr": [rate]}}] for rate in (0.1, 0.2)]
    alike = [{"made": each, "by": ["one function", None]} for each in made]
    assert check_made(alike) == [made[0][0], made[1][0]]
    unlike = [alike[0], {**alike[1], "by": ["another", None]}]
    with pytest.raises(ConfigError, match=r"optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1"):
        check_made(unlike)
    check_made([alike[0], {"made": [], "by": ["another", None]}])
