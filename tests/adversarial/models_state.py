"""Forwards with a state, that draw random numbers, or decide by what they are given."""

import functools
import random
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.cases import CHAINS, NUM_CLASSES, WIDTH, Case, Inner, add, block, forward_block, model


@block
class OwnGenerator(Inner):
    """Stochastic depth from a torch.Generator of its own."""

    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, h):
        if self.training and torch.rand((), generator=self.draw) < 0.5:
            return h
        return h + self.inner(h)


@block
class CounterInList(Inner):
    """Every third forward is another one."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def forward(self, h):
        self.calls[0] += self.training
        return h + self.inner(h) * (2.0 if self.calls[0] % 3 == 0 else 1.0)


@block
class Counter(Inner):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h):
        self.calls += self.training
        return h + self.inner(h) / (1 + 0.1 * self.calls)


@model
def hands_on_by_a_list():
    """A skip that does not pass through the chain: the first block leaves it in a list that the last one reads."""
    kept = []

    class Leaves(Inner):
        def forward(self, h):
            kept.append(torch.tanh(self.inner(h)))
            return kept[-1]

    class Reads(Inner):
        def forward(self, h):
            return self.inner(h) + kept.pop()

    return nn.Sequential(
        nn.Linear(6, WIDTH), Leaves(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Reads(), nn.Linear(WIDTH, NUM_CLASSES)
    )


@model
class HookedSkip(nn.Module):
    """fastai's U-Net: a forward hook keeps what the encoder gave, and the decoder reads it from there."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.kept = {}
        self.encoder[1].register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.kept["skip"] = output

    def forward(self, x):
        h = self.decoder(self.encoder(x))
        return self.head(h + self.kept["skip"])


@model
class KnowsItsParent(nn.Module):
    """A child reads a parameter of its parent by a reference that is not registered."""

    class Child(Inner):
        def __init__(self, parent):
            super().__init__()
            self.parent = [parent]

        def forward(self, h):
            return torch.tanh(self.inner(h)) * self.parent[0].scale

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.children_of = nn.Sequential(self.Child(self), self.Child(self), self.Child(self))

    def forward(self, x):
        return self.leave(self.children_of(self.enter(x) * self.scale))


@block
class StepsInBuffer(Inner):
    """The same counters as a buffer, in place and by assignment: these are saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h):
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=0)
        return self.inner(h - self.mean) * (1.0 / (1.0 + 0.1 * self.steps))


@block
class UnsavedBuffer(Inner):
    """A buffer that moves and is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, h):
        if self.training:
            self.mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
        return self.inner(h - self.mean)


@forward_block
def walks_its_parameters(self, h):
    """A penalty in the forward: all parameters, as the module lists them."""
    size = sum(p.pow(2).sum() for p in self.parameters())
    return self.inner(h) * torch.rsqrt(1.0 + size)


@forward_block
def isinstance_tensor(self, h):
    if isinstance(h, Tensor):
        return torch.tanh(self.inner(h))
    return self.inner(h)


@forward_block
def type_is_tensor(self, h):
    return torch.tanh(self.inner(h)) if type(h) is Tensor else self.inner(h)


@forward_block
def try_except(self, h):
    try:
        gain = 2.0 if float(h.detach().sum()) > 0 else 0.5
    except Exception:
        gain = 1.0
    return self.inner(h) * gain


@forward_block
def asks_the_batch_size(self, h):
    """The last micro-batch is smaller, and takes another way."""
    if h.shape[0] == 3:
        return self.inner(h)
    return torch.tanh(self.inner(h))


@forward_block
def asks_the_values(self, h):
    return self.inner(h) if h.sum() > 0 else torch.tanh(self.inner(h))


@forward_block
def asks_the_length(self, h):
    rows = [self.inner(row) for row in h]
    return torch.stack(rows) / len(h)


@forward_block
def asks_the_dtype(self, h):
    if h.dtype != torch.float64 or h.ndim != 2 or h.is_complex():
        return h
    return self.inner(h) + torch.zeros(h.shape[1], dtype=h.dtype, device=h.device)


@forward_block
def asks_for_gradients(self, h):
    """torch.is_grad_enabled and training choose the way."""
    if self.training and torch.is_grad_enabled():
        return torch.tanh(self.inner(h))
    return self.inner(h) if not self.training else h


@forward_block
def asks_requires_grad(self, h):
    return self.inner(h) * (2.0 if h.requires_grad else 1.0)


@block
class CachedProperty(Inner):
    """A mask that is made when it is first needed."""

    @cached_property
    def mask(self):
        return torch.linspace(0.5, 1.5, WIDTH, dtype=self.inner.weight.dtype)

    @property
    def scaled(self):
        return self.inner.weight * self.mask

    def forward(self, h):
        return torch.tanh(F.linear(h, self.scaled, self.inner.bias))


@block
class RemembersTheLast(Inner):
    """The mean of the micro-batch before is added to this one."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, h):
        y = self.inner(h)
        if self.training:
            y, self.last = y if self.last is None else y + 0.1 * self.last, y.detach().mean(dim=0)
        return y


@forward_block(random="torch")
def dropout_path(self, h):
    """Stochastic depth per sample, timm's."""
    if not self.training:
        return h + self.inner(h)
    keep = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.7)
    return h + self.inner(h) * keep / 0.7


@block(random="torch")
def dropouts():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2), nn.RReLU(), nn.Dropout(0.3, inplace=True))


@forward_block(random="torch")
def noisy_input(self, h):
    return self.inner(h + 0.3 * torch.randn_like(h) if self.training else h)


@forward_block(random="torch")
def noise_without_input(self, h):
    """Drawn from nothing that comes in: tracing might draw once for all."""
    noise = torch.randn(WIDTH, dtype=torch.float64) if self.training else torch.zeros(WIDTH, dtype=torch.float64)
    return self.inner(h) * (1 + 0.3 * noise)


@forward_block(random="torch")
def skips_by_torchs_stream(self, h):
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


block(random="torch")(Sampled)


class PythonDepth(nn.Module):
    """A layer without children that draws from Python's and numpy's global streams."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, h):
        if self.training and (random.random() < 0.3 or np.random.rand() < 0.3):
            return h
        return torch.tanh(F.linear(h, self.weight))


block(random="other")(PythonDepth)


options = {"size": 8}


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


def one_of_some(x):
    return 2.0 if x.shape[0] in (7, 8, 64) else 1.0


def in_fives(x):
    """Ghost statistics: another number of parts, in a walk through what is no number."""
    return torch.cat([part - part.mean(0) for part in x.split(5)]).norm(dim=1, keepdim=True)


def positions(x):
    return torch.arange(x.shape[0], device=x.device).view(-1, 1) / x.shape[0]


DECIDING = [
    more_than_four, one_of_some, in_fives, positions,
]  # fmt: skip
for scale in DECIDING:
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


@forward_block(size=8, counts=(22, 6))
def pairs_of_samples(self, h):
    """Takes an even number of samples only."""
    pairs = self.inner(h).view(-1, 2, WIDTH)
    return torch.cat([pairs[:, 0] + pairs[:, 1], torch.tanh(pairs[:, 0])])
