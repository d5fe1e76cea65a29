"""Blocks that random numbers leave out: stochastic depth, layerdrop."""

import random

import pytest
import torch
from torch import nn

from adl_dist.partition import Chain
from tests.support.staged import compare

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


class Encoder(nn.Module):
    """Blocks in a list, each of which is left out with probability ``p`` in training."""

    def __init__(self, p):
        super().__init__()
        self.embed, self.layers, self.p = nn.Linear(4, 4), nn.ModuleList(Whole() for _ in range(3)), p

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            if not self.training or torch.rand([]).item() >= self.p:
                x = layer(x)
        return x


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


def test_no_cut_lies_inside_a_layer_that_may_be_left_out():
    chain = Chain(Encoder(1e-9), BATCHES)
    places = [unit for n, unit in enumerate(chain.units[:-1]) if n not in chain.forbidden]
    assert places == ["embed", "layers.0.b", "layers.1.b"]


def test_an_encoder_trains_as_the_uncut_model():
    batches = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 4, 5)]
    told = compare(lambda: Encoder(0.3), batches, 3)
    assert told.kind == "equal", told


class Attributes(nn.Module):
    """Two layers, of which one is mostly left out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if not self.training or torch.rand([]).item() >= 0.9 else x


def test_a_layer_in_no_list_is_waited_for_too():
    assert "b" in {call.name for call in Chain(Attributes(), BATCHES).recording.modes[True].calls.values()}


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.unused = Encoder(0.1), nn.Linear(4, 4)

    def forward(self, x):
        return self.encoder(x)


def test_a_module_that_is_never_called_prolongs_no_recording():
    assert len(Chain(WithUnused(), BATCHES).recording.modes[True].readers) < 20
