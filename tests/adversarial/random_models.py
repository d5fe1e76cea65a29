"""Models that draw: torch's stream is replayed by the oracle, of the others two runs are compared."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import WIDTH, Inner, block
from tests.adversarial.stateful_models import STATE


@block(random="torch")
class DropoutPath(Inner):
    """Stochastic depth per sample, timm's."""

    def forward(self, h):
        if not self.training:
            return h + self.inner(h)
        keep = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.7)
        return h + self.inner(h) * keep / 0.7


@block(random="torch")
def dropouts():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2), nn.RReLU(), nn.Dropout(0.3, inplace=True))


@block(random="torch")
class NoisyInput(Inner):
    def forward(self, h):
        return self.inner(h + 0.3 * torch.randn_like(h) if self.training else h)


@block(random="torch", word=STATE)
class NoiseWithoutInput(Inner):
    """Drawn from nothing that comes in: tracing might draw once for all."""

    def forward(self, h):
        noise = torch.randn(WIDTH, dtype=torch.float64) if self.training else torch.zeros(WIDTH, dtype=torch.float64)
        return self.inner(h) * (1 + 0.3 * noise)


@block(random="torch", word=STATE + "|branch|bool|control flow")
class SkipsByTorchsStream(Inner):
    def forward(self, h):
        if self.training and torch.rand(()).item() < 0.5:
            return h
        return h + self.inner(h)


@block(random="torch")
class GumbelChoice(Inner):
    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(WIDTH, 3)
        self.table = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, h):
        scores = self.choose(h)
        chosen = F.gumbel_softmax(scores, tau=0.8, hard=True) if self.training else scores.softmax(dim=1)
        return self.inner(h) + chosen @ self.table


class Sampled(nn.Module):
    """VAE: mean and width of a normal distribution, and a sample of it."""

    def __init__(self):
        super().__init__()
        self.mean, self.width = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        mean, width = self.mean(h), F.softplus(self.width(h))
        return torch.distributions.Normal(mean, width).rsample() if self.training else mean


block(random="torch", word=STATE + "|trac|Normal")(Sampled)


class PythonDepth(nn.Module):
    """A layer without children that draws from Python's and numpy's global streams."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, h):
        if self.training and (random.random() < 0.3 or np.random.rand() < 0.3):
            return h
        return torch.tanh(F.linear(h, self.weight))


block(random="other", word="random|numpy|stream", item="W11")(PythonDepth)
