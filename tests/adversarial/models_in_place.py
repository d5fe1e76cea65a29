"""Operations in place, on inputs, views, and what later layers still need."""

import functools

import numpy as np
import torch
from torch import nn

from tests.adversarial.cases import (
    NUM_CLASSES,
    WIDTH,
    Inner,
    block_of,
    chain,
    embedding,
    linear,
    model,
    model_of,
    several,
)


def behind_linear(odd):
    layers = [nn.Linear(6, WIDTH), odd(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), odd()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def in_place(name, act):
    """Register a block that does ``act`` to the result of its layer, and one that does it to its own input."""

    class OnOutput(Inner):
        def forward(self, h):
            return act(self.inner(h))

    class OnInput(Inner):
        def forward(self, h):
            return torch.tanh(self.inner(act(h)))

    block_of(name=f"in_place_{name}_output")(OnOutput)
    # What is in front is a layer whose backward does not need its output.
    model_of(name=f"in_place_{name}_input")(lambda: behind_linear(OnInput))


def set_columns(h):
    h[:, :3] = 0.5
    return h


def set_by_mask(h):
    h[h < 0] *= 0.1
    return h


def transpose_in_place(h):
    return h.t_().mul_(0.5).t_()


def write_by_a_view(h):
    whole = h.view(-1, 2, WIDTH // 2)
    whole[:, 0].mul_(0.5)
    whole.add_(0.1)
    return h


for name, act in {
    "relu": torch.relu_, "columns": set_columns, "mask": set_by_mask,
    "reshaped": write_by_a_view, "transposed": transpose_in_place,
}.items():  # fmt: skip
    in_place(name, act)


@model(enter=linear(6), a=linear(), act=lambda: nn.ReLU(inplace=True), b=linear(), head=linear(WIDTH, NUM_CLASSES))
def residual_in_place(self, x):
    """What is added later was changed in place meanwhile, before or behind a cut."""
    h = self.enter(x)
    y = self.a(self.act(h))
    y += h
    z = self.b(y.clone())
    z.mul_(2).add_(h)
    return self.head(z + y)


def conv(num_in, num_out):
    norm, act = functools.partial(nn.InstanceNorm2d, num_out, affine=True), functools.partial(nn.LeakyReLU, 0.1, True)
    return chain(functools.partial(nn.Conv2d, num_in, num_out, 3, padding=1), norm, act)


@model("images", enter=conv(3, 4), low=conv(4, 4), up=lambda: nn.Upsample(scale_factor=2), leave=conv(8, 4),
       head=lambda: nn.Conv2d(4, NUM_CLASSES, 1))  # fmt: skip
def unet_in_place(self, x):
    """What a norm returns is a view of its own, into which the activation behind it writes."""
    skip = self.enter(x)
    h = self.up(self.low(nn.functional.max_pool2d(skip, 2)))
    return self.head(self.leave(torch.cat([skip, h], dim=1))).mean(dim=(2, 3))


@model(a=linear(6), b=linear(), c=linear(WIDTH, 6), head=linear(6, NUM_CLASSES))
def changes_the_input(self, x):
    """The input itself is normalised in place, and used again at the end."""
    x.sub_(x.mean(dim=1, keepdim=True))
    h = torch.tanh(self.b(torch.tanh(self.a(x))))
    return self.head(self.c(h) + x)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h):
        return h.mul_(self.gain.detach() * 1.5)


@model(enter=linear(6), scale=Scale, a=linear(4), b=linear(), head=linear(WIDTH, NUM_CLASSES))
def changes_the_whole(self, x):
    """A view is taken before a cut, the whole is changed in place behind it."""
    h = self.enter(x)
    part = h[:, :4]
    h = self.scale(h)
    return self.head(torch.tanh(self.a(part)) + self.b(h))


@model(enter=linear(6), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def writes_with_numpys_numbers(self, x):
    h = self.enter(x)
    for layer in self.layers:
        h = layer(h)
        h *= np.sqrt(WIDTH)
        h[:, np.array([0, 2])] *= 0.5
        h = torch.tanh(h)
    return self.head(h)


@model("tokens", embed=embedding(), layers=several(3, linear()), gate=embedding(), head=linear(WIDTH, NUM_CLASSES))
def shifts_its_tokens(self, words):
    """Tokens are written to a new tensor, also through a view; a later stage needs them for that only."""
    shifted = words.new_zeros(words.shape)
    shifted[:, 1:] = words[:, :-1]
    shifted[:, :1].copy_(words[:, -1:])
    h = self.embed(torch.ones_like(words))
    for layer in self.layers:
        h = torch.tanh(layer(h))
    return self.head(torch.tanh(self.gate(shifted) * h).mean(dim=1))


@model("tokens", embed=embedding(), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def writes_to_its_tokens(self, words):
    words.clamp_(min=1)
    h = self.embed(words)
    for layer in self.layers:
        h = torch.tanh(layer(h))
    return self.head(h.mean(dim=1))


@model(enter=linear(6), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def fills_a_table_in_a_loop(self, x):
    table = torch.zeros(40)
    for place in range(40):
        table[place] = place / 40
    h = self.enter(x)
    for layer in self.layers:
        h = torch.tanh(layer(h) + table[:WIDTH])
    return self.head(h)


@model("tokens", embed=embedding(), layers=several(3, linear()), head=linear(WIDTH, NUM_CLASSES))
def tokens_without_a_gradient(self, words):
    """These functions write no elements."""
    h = self.embed(words.requires_grad_(False).detach_())
    for layer in self.layers:
        h = torch.tanh(layer(h))
    return self.head(h.mean(dim=1))
