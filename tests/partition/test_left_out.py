"""Blocks that random numbers leave out: stochastic depth, layerdrop."""

import random

import pytest
import torch
from torch import nn

from adl_dist.partition import Chain

BATCHES = [torch.ones(2, 4), torch.ones(3, 4)]
DRAWS = {"python": random.random, "torch": lambda: torch.rand(1).item()}


class Block(nn.Module):
    """A residual block that is left out with probability ``p`` in training."""

    def __init__(self, p, stream):
        super().__init__()
        self.a, self.b, self.p, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), p, DRAWS[stream]

    def forward(self, x):
        if self.training and self.draw() < self.p:
            return x
        return x + self.b(self.a(x).relu())


def recorded(p, stream):
    model = nn.Sequential(nn.Linear(4, 4), *[Block(p, stream) for _ in range(4)])
    return Chain(model, BATCHES)


@pytest.mark.parametrize("stream", DRAWS)
def test_what_is_recorded_does_not_depend_on_the_global_streams(stream):
    found = set()
    for seed in range(4):
        random.seed(seed)
        torch.manual_seed(seed)
        chain = recorded(0.5, stream)
        found.add(repr([[sorted(map(str, run)) for run in mode.readers] for mode in chain.recording.modes.values()]))
    assert len(found) == 1


@pytest.mark.parametrize("stream", DRAWS)
def test_no_cut_lies_in_a_block_that_may_be_left_out(stream):
    """Though it was not, in any recorded run."""
    chain = recorded(1e-9, stream)
    places = [unit for n, unit in enumerate(chain.units[:-1]) if n not in chain.forbidden]
    assert places == ["0", "1.b", "2.b", "3.b"]
    assert chain.forbidden[1] == "'1' draws random numbers that may decide what it calls"


def test_runs_are_recorded_until_every_block_was_called():
    calls = recorded(0.9, "torch").recording.modes[True].calls.values()
    assert {f"{block}.{part}" for block in range(1, 5) for part in "ab"} <= {call.name for call in calls}
