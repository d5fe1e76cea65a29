"""Forwards with a state that is no buffer, draw random numbers, or ask what they are given."""

import random
import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, WIDTH, Inner, block, model

STATE = "state|random|generator|counter|differs|trac|uncut|attribute|buffer|changes"


@block(word=STATE, item="W3")
class OwnGenerator(Inner):
    """Stochastic depth from a torch.Generator of its own."""

    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, h):
        if self.training and torch.rand((), generator=self.draw) < 0.5:
            return h
        return h + self.inner(h)


@block(word=STATE, item="W3")
class NumpyGenerator(Inner):
    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(3)

    def forward(self, h):
        return h + self.inner(h) * (self.draw.random() < 0.7 if self.training else 0.7)


@block(word=STATE, item="W3")
class PythonGenerator(Inner):
    def __init__(self):
        super().__init__()
        self.draw = random.Random(3)

    def forward(self, h):
        return h + self.inner(h) * (self.draw.uniform(0.5, 1.5) if self.training else 1.0)


@block(word=STATE, item="W3")
class CounterInList(Inner):
    """Every third forward is another one."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def forward(self, h):
        self.calls[0] += self.training
        return h + self.inner(h) * (2.0 if self.calls[0] % 3 == 0 else 1.0)


@block(word=STATE, item="W3")
class Counter(Inner):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h):
        self.calls += self.training
        return h + self.inner(h) / (1 + 0.1 * self.calls)


class PlainCounter(nn.Module):
    """The same as a layer of its own, as the message advises; it is not traced."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h):
        self.calls += self.training
        return h / (1 + 0.1 * self.calls)


block(item="W10")(PlainCounter)


@dataclass
class Config:
    step: int = 0
    gain: float = 1.0


@block(word=STATE, item="W3")
class CounterInConfig(Inner):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, h):
        if self.training:
            self.config.step += 1
            self.config.gain = 1.0 + 0.2 * (self.config.step % 4)
        return h + self.inner(h) * self.config.gain


def counts_calls():
    """A model of blocks that share a counter by a closure: the number is of both blocks' calls."""
    calls = 0

    class Block(Inner):
        def forward(self, h):
            nonlocal calls
            calls += self.training
            return h + self.inner(h) * (1.0 + 0.1 * (calls % 5))

    return nn.Sequential(nn.Linear(6, WIDTH), Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, NUM_CLASSES))


# Two stages forward at other times than one model does, so that what they share cannot be what it is uncut.
model(word=STATE, item="W3")(counts_calls)


@model(word=STATE, item="W3")
def counts_in_the_class():
    class Block(Inner):
        calls = 0

        def forward(self, h):
            type(self).calls += self.training
            return h + self.inner(h) * (1.0 + 0.1 * (type(self).calls % 5))

    return nn.Sequential(nn.Linear(6, WIDTH), Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, NUM_CLASSES))


CALLS = 0  # of all blocks below


class CountsGlobally(Inner):
    def forward(self, h):
        global CALLS
        CALLS += self.training
        return h + self.inner(h) * (1.0 + 0.1 * (CALLS % 5))


@model(word=STATE, item="W3")
def counts_globally():
    global CALLS
    CALLS = 0
    return nn.Sequential(
        nn.Linear(6, WIDTH), CountsGlobally(), nn.Tanh(), CountsGlobally(), nn.Linear(WIDTH, NUM_CLASSES)
    )


def pooled(h, table):
    table.append(float(h.mean()))
    return h * (1.0 + 0.1 * (len(table) % 5))


TABLE = []  # what helper functions leave


class HelpedByAGlobalList(Inner):
    def forward(self, h):
        return h + self.inner(pooled(h, TABLE) if self.training else h)


@model(word=STATE, item="W3")
def appends_to_a_global_list():
    TABLE.clear()
    return nn.Sequential(
        nn.Linear(6, WIDTH), HelpedByAGlobalList(), nn.Tanh(), HelpedByAGlobalList(), nn.Linear(WIDTH, NUM_CLASSES)
    )


@model(word=STATE, item="W3")
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


@model(word=STATE + "|hook", item="W3")
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


@model(word=STATE + "|Parent|scale|own", item="W5")
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


@block(word=STATE)
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


@block(word=STATE, item="W10")
class UnsavedBuffer(Inner):
    """A buffer that moves and is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, h):
        if self.training:
            self.mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
        return self.inner(h - self.mean)


@block(word=STATE, item="W3")
class ReadsNamedBuffers(Inner):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h):
        mean = dict(self.named_buffers())["mean"]
        if self.training:
            mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
        return self.inner(h - mean)


@block(word=STATE + "|parameters", item="W3")
class WalksItsParameters(Inner):
    """A penalty in the forward: all parameters, as the module lists them."""

    def forward(self, h):
        size = sum(p.pow(2).sum() for p in self.parameters())
        return self.inner(h) * torch.rsqrt(1.0 + size)


# --- Questions to what it is given -----------------------------------------------------------------------------

KIND = "isinstance|type|is_tensor|hasattr|except|uncut|differs|Tensor"


@block(word=KIND, item="W2")
class IsinstanceTensor(Inner):
    def forward(self, h):
        if isinstance(h, Tensor):
            return torch.tanh(self.inner(h))
        return self.inner(h)


@block(word=KIND, item="W2")
class IsTensor(Inner):
    def forward(self, h):
        return torch.tanh(self.inner(h)) if torch.is_tensor(h) else self.inner(h)


@block(word=KIND, item="W2")
class TypeIsTensor(Inner):
    def forward(self, h):
        return torch.tanh(self.inner(h)) if type(h) is Tensor else self.inner(h)


@block(word=KIND, item="W2")
class IsinstanceInt(Inner):
    def forward(self, h):
        size = h.shape[1] if isinstance(h.shape[1], int) else 1
        rows = 2 if isinstance(h.size(0), int) else 1
        return self.inner(h) * (rows / size)


@block(word=KIND, item="W2")
class HasattrProxy(Inner):
    def forward(self, h):
        return self.inner(h.logits if hasattr(h, "logits") else torch.tanh(h))


@block(word=KIND, item="W2")
class TryExcept(Inner):
    def forward(self, h):
        try:
            gain = 2.0 if float(h.detach().sum()) > 0 else 0.5
        except Exception:
            gain = 1.0
        return self.inner(h) * gain


@block(word="shape|trac|control flow|branch|bool")
class AsksTheBatchSize(Inner):
    """The last micro-batch is smaller, and takes another way."""

    def forward(self, h):
        if h.shape[0] == 3:
            return self.inner(h)
        return torch.tanh(self.inner(h))


@block(word="trac|control flow|branch|bool")
class AsksTheValues(Inner):
    def forward(self, h):
        return self.inner(h) if h.sum() > 0 else torch.tanh(self.inner(h))


@block(word="trac|control flow|len")
class AsksTheLength(Inner):
    def forward(self, h):
        rows = [self.inner(row) for row in h]
        return torch.stack(rows) / len(h)


@block()
class AsksTheDtype(Inner):
    def forward(self, h):
        if h.dtype != torch.float64 or h.ndim != 2 or h.is_complex():
            return h
        return self.inner(h) + torch.zeros(h.shape[1], dtype=h.dtype, device=h.device)


@block()
class AsksForGradients(Inner):
    """torch.is_grad_enabled and training choose the way."""

    def forward(self, h):
        if self.training and torch.is_grad_enabled():
            return torch.tanh(self.inner(h))
        return self.inner(h) if not self.training else h


@block(word="requires_grad|trac|differs")
class AsksRequiresGrad(Inner):
    def forward(self, h):
        return self.inner(h) * (2.0 if h.requires_grad else 1.0)


@block()
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


@block(word=STATE)
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


LOCAL = threading.local()


@block(word=STATE)
class ThreadLocalState(Inner):
    """A gain in a global of the thread, which a block sets for itself."""

    def __init__(self):
        super().__init__()
        LOCAL.gain = 1.0

    def forward(self, h):
        LOCAL.gain = LOCAL.gain if not self.training else 1.5
        return self.inner(h) * (LOCAL.gain if self.training else 1.0)
