"""Forwards with a state, that draw random numbers, that decide by what they are given, and shared memory."""

import functools
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.cases import (
    NUM_CLASSES,
    WIDTH,
    Inner,
    block,
    block_of,
    buffer,
    chain,
    linear,
    model,
    model_of,
    several,
    weight,
    with_forward,
)

# --- State -------------------------------------------------------------------------------------------------------


@block(inner=linear(), draw=lambda: torch.Generator().manual_seed(5))
def own_generator(self, h):
    """Stochastic depth from a torch.Generator of its own."""
    if self.training and torch.rand((), generator=self.draw) < 0.5:
        return h
    return h + self.inner(h)


@block(inner=linear(), calls=int)
def counter(self, h):
    self.calls += self.training
    return h + self.inner(h) / (1 + 0.1 * self.calls)


@model_of()
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

    return chain(linear(6), Leaves, linear(), nn.Tanh, Reads, linear(WIDTH, NUM_CLASSES))()


@model_of()
class HookedSkip(nn.Module):
    """fastai's U-Net: a forward hook keeps what the encoder gave, and the decoder reads it from there."""

    def __init__(self):
        super().__init__()
        self.encoder = chain(linear(6), nn.Tanh, linear(), nn.Tanh)()
        self.decoder, self.head, self.kept = chain(linear(), nn.Tanh)(), nn.Linear(WIDTH, NUM_CLASSES), {}
        self.encoder[1].register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.kept["skip"] = output

    def forward(self, x):
        h = self.decoder(self.encoder(x))
        return self.head(h + self.kept["skip"])


class Child(Inner):
    def __init__(self, parent):
        super().__init__()
        self.parent = [parent]

    def forward(self, h):
        return torch.tanh(self.inner(h)) * self.parent[0].scale


@model_of()
class KnowsItsParent(nn.Module):
    """A child reads a parameter of its parent by a reference that is not registered."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.children_of = nn.Sequential(Child(self), Child(self), Child(self))

    def forward(self, x):
        return self.leave(self.children_of(self.enter(x) * self.scale))


def zeros():
    return torch.zeros(WIDTH)


@block(inner=linear(), steps=buffer(lambda: torch.zeros((), dtype=torch.long)), mean=buffer(zeros))
def steps_in_buffer(self, h):
    """A counter and an average in buffers, in place and by assignment: these are saved."""
    if self.training:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=0)
    return self.inner(h - self.mean) * (1.0 / (1.0 + 0.1 * self.steps))


@block(inner=linear(), last=lambda: None)
def remembers_the_last(self, h):
    """The mean of the micro-batch before is added to this one."""
    y = self.inner(h)
    if self.training:
        y, self.last = y if self.last is None else y + 0.1 * self.last, y.detach().mean(dim=0)
    return y


@block()
def keeps_its_map(self, h):
    """The last activation as an attribute, as attention maps are kept."""
    self.map = torch.softmax(self.inner(h), dim=1)
    return h * self.map


@block(inner=linear(), norm=lambda: nn.BatchNorm1d(WIDTH))
def scaled_by_its_statistics(self, h):
    """Each stage runs what reads the statistics, and one of them changes them."""
    h = self.inner(h) * torch.sqrt(self.norm.running_var + 1)
    return torch.tanh(self.norm(h))


class KeepsItsMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.mean = nn.Parameter(torch.ones(WIDTH)), nn.Buffer(torch.zeros(WIDTH))

    def forward(self, h):
        self.mean.data.lerp_(h.detach().mean(dim=0), 0.5)
        return self.gain * (h - self.mean)


@model(enter=linear(6), norm=KeepsItsMean, layers=several(4, linear()), head=linear(WIDTH, NUM_CLASSES))
def written_through_data(self, x):
    """A layer with two uses writes to its buffer through ``data``, which has a version of its own."""
    h = self.norm(self.enter(x))
    for layer in self.layers:
        h = torch.tanh(layer(h))
    return self.head(self.norm(h))


class KeepsItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.last = nn.Parameter(torch.ones(WIDTH)), nn.Buffer(torch.zeros(1))

    def forward(self, h):
        self.last.data = h.detach().clone()
        return self.gain * h


@model(enter=linear(6), keep=KeepsItsInput, layer=linear(), head=linear(WIDTH, NUM_CLASSES))
def buffer_of_each_batchs_shape(self, x):
    return self.head(torch.tanh(self.layer(self.keep(self.enter(x)))))


# --- Shared memory -----------------------------------------------------------------------------------------------


class Follows(Inner):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, h):
        if self.training:
            self.mean.mul_(0.8).add_(h.detach().mean(dim=0), alpha=0.2)
        return self.inner(h - self.mean.clone())


@model_of()
def shared_buffer():
    """Two layers follow one average; who moves it first must not depend on the pipeline."""
    follows = functools.partial(Follows, torch.zeros(WIDTH, dtype=torch.float64))
    return chain(linear(6), follows, nn.Tanh, linear(), follows, linear(WIDTH, NUM_CLASSES))()


class Consistency(nn.Module):
    def __init__(self, student):
        super().__init__()
        self.student = [student]
        self.register_buffer("average", student.weight.detach().clone())
        self.out = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, h):
        if self.training:
            self.average.lerp_(self.student[0].weight.detach(), 0.2)
        return self.out(h) * self.average.mean().detach()


@model_of()
class TeacherOfTheWhole(nn.Module):
    """The last unit keeps the average of the first one's weights, by a reference that is not registered."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(6, WIDTH), chain(nn.Tanh, linear(), nn.Tanh, linear())()
        self.last = Consistency(self.first)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


# --- Contexts and questions --------------------------------------------------------------------------------------


@block()
def saved_on_cpu(self, h):
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(self.inner(h)) * h


@block()
def in_inference_mode(self, h):
    with torch.inference_mode():
        chosen = self.inner(h).argmax(dim=1)
    return h * F.one_hot(chosen.clone(), WIDTH)


@block()
def asks_input_for_gradient(self, h):
    """As code with gradient penalties does."""
    if not h.requires_grad and torch.is_grad_enabled():
        h.requires_grad_()
    h.retain_grad() if h.requires_grad else None
    return torch.tanh(self.inner(h))


@block()
def walks_its_parameters(self, h):
    """A penalty in the forward: all parameters, as the module lists them."""
    size = sum(p.pow(2).sum() for p in self.parameters())
    return self.inner(h) * torch.rsqrt(1.0 + size)


@block()
def type_is_tensor(self, h):
    return torch.tanh(self.inner(h)) if type(h) is Tensor else self.inner(h)


@block()
def try_except(self, h):
    try:
        gain = 2.0 if float(h.detach().sum()) > 0 else 0.5
    except Exception:
        gain = 1.0
    return self.inner(h) * gain


@block()
def asks_the_values(self, h):
    return self.inner(h) if h.sum() > 0 else torch.tanh(self.inner(h))


@block()
def asks_the_length(self, h):
    rows = [self.inner(row) for row in h]
    return torch.stack(rows) / len(h)


@block()
def asks_the_dtype(self, h):
    if h.dtype != torch.float64 or h.ndim != 2 or h.is_complex():
        return h
    return self.inner(h) + torch.zeros(h.shape[1], dtype=h.dtype, device=h.device)


def more_than_four(x):
    return 2.0 if x.shape[0] > 4 else 1.0


def in_fives(x):
    """Ghost statistics: the number of parts follows from the batch size."""
    return torch.cat([part - part.mean(0) for part in x.split(5)]).norm(dim=1, keepdim=True)


def positions(x):
    return torch.arange(x.shape[0], device=x.device).view(-1, 1) / x.shape[0]


def root_asks(self, x):
    """The model's own forward asks, in front of its layers, what ``scale`` makes of the input."""
    factor = self.scale(x)
    return self.head(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)) * factor)))) * factor)


def block_asks(self, h):
    return torch.tanh(self.inner(h)) * self.scale(h)


PARTS = {"a": linear(6), "b": linear(), "c": linear(), "head": linear(WIDTH, NUM_CLASSES)}


ASKING = {"root_asks": (model_of, root_asks, PARTS), "block_asks": (block_of, block_asks, {"inner": linear()})}
for scale in (more_than_four, in_fives, positions):
    for name, (register, forward, parts) in ASKING.items():
        build = with_forward(forward, parts | {"scale": lambda scale=scale: scale})
        register(name=f"{name}_{scale.__name__}", size=8)(build)


@model(size=8, inner=chain(linear(6), nn.Tanh, linear(), nn.Tanh), head=linear(WIDTH, NUM_CLASSES))
def loops_over_samples(self, x):
    h = self.inner(x)
    return self.head(torch.stack([h[i] / (1 + i) for i in range(x.shape[0])]))


# --- Random numbers ----------------------------------------------------------------------------------------------


@block()
def forks_the_stream(self, h):
    """Draws the same mask every time, and does not disturb the stream around it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        mask = torch.rand(WIDTH, dtype=torch.float64) < 0.7
    return F.dropout(self.inner(h * mask), 0.2, self.training)


@block()
def dropout_path(self, h):
    """Stochastic depth per sample, timm's."""
    if not self.training:
        return h + self.inner(h)
    keep = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.7)
    return h + self.inner(h) * keep / 0.7


@block_of()
def dropouts():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2), nn.RReLU(), nn.Dropout(0.3, inplace=True))


@block()
def skips_by_torchs_stream(self, h):
    if self.training and torch.rand(()).item() < 0.5:
        return h
    return h + self.inner(h)


@block(inner=linear(), choose=linear(WIDTH, 3), table=weight(3, WIDTH, scale=1.0))
def gumbel_choice(self, h):
    scores = self.choose(h)
    chosen = F.gumbel_softmax(scores, tau=0.8, hard=True) if self.training else scores.softmax(dim=1)
    return self.inner(h) + chosen @ self.table


@block(weight=weight(WIDTH, WIDTH))
def python_depth(self, h):
    """A layer without children that draws from Python's and numpy's global streams."""
    if self.training and (random.random() < 0.3 or np.random.rand() < 0.3):
        return h
    return torch.tanh(F.linear(h, self.weight))
