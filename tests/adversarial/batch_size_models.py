"""Forwards that ask for the number of samples, and get another answer for the run than for the samples of the start.

Micro-batches hold 8 samples, the last one 7, in evaluation 7: none is among the sizes that a forward is read with.
"""

import functools
import math

import torch
from torch import nn

from tests.adversarial.cases import CHAINS, NUM_CLASSES, WIDTH, Case, Inner, add, block, model

ASKS = "for batches of|other sizes|cannot be traced"
options = {"size": 8, "word": ASKS}


class Asking(nn.Module):
    """Asks in its own forward, in front of its layers, what ``scale`` makes of the input."""

    def __init__(self, scale):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.scale = nn.Linear(WIDTH, NUM_CLASSES), scale

    def forward(self, x):
        factor = self.scale(x)
        return self.head(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)) * factor)))) * factor)


class AskingBlock(Inner):
    """A block that does so."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, h):
        return torch.tanh(self.inner(h)) * self.scale(h)


def more_than_four(x):
    return 2.0 if x.shape[0] > 4 else 1.0


def multiple_of_eight(x):
    return 0.5 if x.size(0) % 8 == 0 else 1.0


def between(x):
    return max(x.shape[0], 5) / min(x.shape[0], 6)


def at_least_six(x):
    B = x.shape[0]
    return (B if B > 6 else 6) / 6


def whole_logarithm(x):
    return 0.5 * int(math.log2(len(x)))


def by_table(x):
    return {7: 0.5, 8: 2.0}.get(x.shape[0], 1.0)


def one_of_some(x):
    return 2.0 if x.shape[0] in (7, 8, 64) else 1.0


def many_numbers(x):
    return 2.0 if x.numel() > 30 else 1.0


def many_bytes(x):
    return 2.0 if x.nbytes > 240 else 1.0


def after_the_fourth(x):
    return 2.0 if x[4:].shape[0] else 1.0


def in_fives(x):
    """Ghost statistics: another number of parts, in a walk through what is no number."""
    return torch.cat([part - part.mean(0) for part in x.split(5)]).norm(dim=1, keepdim=True)


def eighths(x):
    return 1 / (1 + x.shape[0] // 8)


def logarithm(x):
    return math.log2(x.shape[0]) / 2


def positions(x):
    return torch.arange(x.shape[0], device=x.device).view(-1, 1) / x.shape[0]


def same_sizes(x):
    B, width = x.shape
    assert B == x.flatten(1).size(0) == x.view(B, -1).shape[0]
    assert B > 0
    assert B * width == x.numel()
    return 1 / B


DECIDING = [
    more_than_four, multiple_of_eight, between, at_least_six, whole_logarithm, by_table, one_of_some, many_numbers,
    many_bytes, after_the_fourth, in_fives,
]  # fmt: skip
COMPUTING = [eighths, logarithm, positions, same_sizes]  # nothing but values: these may be cut
for scale in DECIDING + COMPUTING:
    model(name=f"root_asks_{scale.__name__}", **options)(functools.partial(Asking, scale))
    in_a_chain = functools.partial(CHAINS["vectors"], functools.partial(AskingBlock, scale))
    add(Case(name=f"block_asks_{scale.__name__}", build=in_a_chain, **options))


@model(**options)
class LoopsOverSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.inner(x)
        return self.head(torch.stack([h[i] / (1 + i) for i in range(x.shape[0])]))


@block(size=8, counts=(22, 6))
class NormOfHalves(Inner):
    """Ghost BatchNorm: each half of an even number of samples has statistics of its own."""

    def forward(self, h):
        first, second = self.inner(h).chunk(2)
        return torch.cat([first - first.mean(0), second - second.mean(0)])


@block(size=8, counts=(22, 6))
class PairsOfSamples(Inner):
    """Takes an even number of samples only."""

    def forward(self, h):
        pairs = self.inner(h).view(-1, 2, WIDTH)
        return torch.cat([pairs[:, 0] + pairs[:, 1], torch.tanh(pairs[:, 0])])
