"""Parameters that are more than tensors: referred to, tied in secret, sharing memory, with attributes (W5)."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversarial.cases import WIDTH, block, model


@block(word="alias|refer|list|parameter", item="W5")
class AliasedParameters(nn.Module):
    """Registered, and kept in a plain list, too, which the forward reads."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.zeros(WIDTH))
        self.kept = [self.weight, self.bias]

    def forward(self, h):
        return torch.tanh(F.linear(h, *self.kept))


@block(word="alias|refer|list|parameter|tie|tied", item="W5")
class ClosureOverWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        weight = self.inner.weight
        self.penalty = lambda h: h * weight.mean()

    def forward(self, h):
        return self.inner(h) + self.penalty(h)


@model(word="tie|tied|refer", item="W5")
class HiddenTie(nn.Module):
    """The classifier of the last layer is the embedding, by a plain list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH, bias=False)
        self.layers = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = self.Last(self.embed)

    class Last(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.tied = [embed]
            self.bias = nn.Parameter(torch.zeros(6))

        def forward(self, h):
            return F.linear(h, self.tied[0].weight.t(), self.bias)

    def forward(self, x):
        return self.last(self.layers(self.embed(x)))


@model(word="storage|share|tie|tied|memory")
class OneStorage(nn.Sequential):
    """Two parameters that are views of one tensor: an update of one is an update of both."""

    def __init__(self):
        both = torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3
        super().__init__(
            nn.Linear(6, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 5),
        )
        self.double()  # a conversion would part them
        self[1].weight, self[3].weight = nn.Parameter(both), nn.Parameter(both.t())


@block(word="view|storage|buffer|shares|refer", item="W5")
class BufferOfWeight(nn.Module):
    """A buffer that is the parameter's own memory: it moves with every update."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("mirror", self.inner.weight.detach(), persistent=False)

    def forward(self, h):
        return torch.tanh(self.inner(h)) + 0.1 * F.linear(h, self.mirror)


class Named(nn.Parameter):
    """A subclass that its layer asks for."""


@block(item="W5")
class OwnKindOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Named(torch.randn(WIDTH, WIDTH) / 3)
        self.weight.gain = 1.5

    def forward(self, h):
        return F.linear(h, self.weight) * getattr(self.weight, "gain", 1.0)


@block(item="W5")
class BlocksMaskedByAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.mask = (torch.arange(WIDTH) % 2).double()

    def forward(self, h):
        return torch.tanh(F.linear(h, self.inner.weight * self.inner.weight.mask, self.inner.bias))
