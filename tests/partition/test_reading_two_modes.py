"""Each mode is read as it computes, though layers of torch run for one of them only while a forward is read."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cut_model import read

WIDTH = 4
SIZES = (2, 4)


def rows(size):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size)).double()


class Pads(nn.Module):
    """A layer of the user's own."""

    def forward(self, x):
        return F.pad(x, (0, 0))


class PairInTraining(nn.Module):
    def forward(self, x):
        return (x, x) if self.training else x


class WidensInTraining(nn.Module):
    def forward(self, x):
        return torch.cat([x, x], 1) if self.training else x


class Net(nn.Module):
    def __init__(self, forward, own):
        super().__init__()
        self.a, self.norm, self.own, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), own, nn.Linear(WIDTH, 2)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def takes_first(self, x):
    x = self.own(self.norm(self.a(x)))
    return self.b(x[0] if isinstance(x, tuple) else x)


def cuts_to_width(self, x):
    x = self.own(self.norm(self.a(x)))
    return self.b(x[:, :WIDTH] if x.shape[1] > WIDTH else x)


def asks_for_gradient(self, x):
    x = self.norm(self.a(x))
    return self.b(2 * x if x.requires_grad else x)


def plain(self, x):
    return self.b(self.own(self.norm(self.a(x))))


MODELS = {
    "alike": (plain, Pads),
    "another type": (takes_first, PairInTraining),
    "another shape": (cuts_to_width, WidensInTraining),
    "a question for gradients": (asks_for_gradient, Pads),
}


@pytest.mark.parametrize(("forward", "own"), MODELS.values(), ids=MODELS)
def test_each_mode_is_read_as_it_computes(forward, own):
    torch.manual_seed(0)
    model = Net(forward, own()).double()
    chain = read(model, rows)
    stages = chain.pieces([len(chain.units) // 2, len(chain.units) - len(chain.units) // 2])
    for mode in (True, False):
        for module in (model, *stages):
            module.train(mode)
        with torch.set_grad_enabled(mode):
            assert torch.equal(stages[1](stages[0](rows(5))), model(rows(5)))


def test_layers_of_torch_run_for_one_mode_only():
    with patch.object(F, "linear", wraps=F.linear) as linear:
        read(Net(plain, Pads()).double(), rows)
    assert linear.call_count == 2 * len(SIZES)
