"""The blocks of the random networks: [B, 8] to [B, 8], or to several of them."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.layer, self.norm, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=inplace)

    def forward(self, h):
        y = self.act(self.norm(self.layer(h)))
        y += h
        return y


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 16)

    def forward(self, h):
        return F.glu(self.both(h), dim=-1) + h


class Average(nn.Module):
    """A buffer that follows its input."""

    def __init__(self, persistent=True):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)

    def forward(self, h):
        if self.training:
            self.mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
        return self.layer(h) - self.mean


class Codes(nn.Module):
    """No gradient gets through the choice of a row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, h):
        return self.table(h.argmax(dim=1))


class Stop(nn.Module):
    """Its input learns nothing from it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h):
        return torch.tanh(self.layer(h.detach()))


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 3), nn.Linear(3, 8)

    def forward(self, h):
        return h + self.up(torch.tanh(self.down(h)))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((8,), 0.7))

    def forward(self, h):
        return h.mul_(self.gain.detach()) + self.gain


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a, b):
        return self.a(a), torch.tanh(self.b(b))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, h):
        y = self.a(h)
        return h, (torch.tanh(y), y.sum(dim=1, keepdim=True))


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, a, b):
        return {"low": self.a(a), "rest": [b, a > 0]}


class ListOfOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, h):
        return [torch.tanh(self.a(h))]


class Twin(nn.Module):
    """One tensor twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, h):
        y = self.a(h)
        return y, y
