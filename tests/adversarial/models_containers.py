"""What blocks return and modules are kept in; parameters with several references."""

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, WIDTH, block, model


class Fork(nn.Module):
    """A block that makes two values of one and packs them by ``pack``."""

    def __init__(self, pack, entry=WIDTH):
        super().__init__()
        self.a, self.b, self.pack = nn.Linear(entry, WIDTH), nn.Linear(entry, WIDTH), pack

    def forward(self, h):
        return self.pack(torch.tanh(self.a(h)), self.b(h))


class Middle(nn.Module):
    """Takes the packed values apart, works on both, packs them again."""

    def __init__(self, pack, take):
        super().__init__()
        self.a, self.b, self.pack, self.take = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), pack, take

    def forward(self, both):
        a, b = self.take(both)
        return self.pack(a + torch.tanh(self.b(b)), torch.tanh(self.a(a)))


class Join(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.out, self.take = nn.Linear(WIDTH, NUM_CLASSES), take

    def forward(self, both):
        a, b = self.take(both)
        return self.out(a * b)


def packed(pack, take):
    return nn.Sequential(
        Fork(pack, 6), Middle(pack, take), Middle(pack, take), Middle(pack, take), Middle(pack, take), Join(take)
    )


PACKS = {
    "pair": (lambda a, b: (a, b), lambda t: t),
    "list": (lambda a, b: [a, b], lambda t: t),
    "nested_tuple": (lambda a, b: (a, (b, a.sum(1))), lambda t: (t[0], t[1][0] * t[1][1][:, None])),
    "deep_list": (lambda a, b: [[a], [[b]]], lambda t: (t[0][0], t[1][0][0])),
    "list_of_one": (lambda a, b: (a, [b]), lambda t: (t[0], t[1][0])),
    "just_one_in_a_list": (lambda a, b: [a + b], lambda t: (t[0], t[0])),
    "dictionary": (lambda a, b: {"a": a, "b": b}, lambda t: (t["a"], t["b"])),
    "ordered_dictionary": (lambda a, b: OrderedDict(z=a, b=b), lambda t: (t["z"], t["b"])),
    "dictionary_of_lists": (lambda a, b: {"both": [a, b], "sum": (a.sum(1),)}, lambda t: t["both"]),
    "integer_keys": (lambda a, b: {1: a, 0: b}, lambda t: (t[1], t[0])),
    "same_tensor_twice": (lambda a, b: (a, a, b), lambda t: (t[0] * 0.5, t[1] + t[2])),
    "twin_in_a_list": (lambda a, b: (lambda y: (y, [y]))(a + b), lambda t: (t[0], t[1][0])),
    "with_integers": (lambda a, b: (a, b, a.argmax(1)), lambda t: (t[0], t[1] + F.one_hot(t[2], WIDTH))),
    "with_booleans": (lambda a, b: (a, b, a > 0), lambda t: (t[0], torch.where(t[2], t[1], 0.5 * t[1]))),
    "part_of_another": (lambda a, b: (a, b, b[:, :4]), lambda t: (t[0], t[1] + t[2].repeat(1, 2))),
    "transposed": (lambda a, b: (a[:, :, None].expand(-1, -1, 3).transpose(1, 2), b), lambda t: (t[0].mean(1), t[1])),
    "complex": (lambda a, b: torch.complex(a, b), lambda z: (z.real, z.imag.abs())),
    "float32": (lambda a, b: (a.float(), b), lambda t: (t[0].double(), t[1])),
}  # fmt: skip
NOT_ONLY_TENSORS = {
    "with_none": (lambda a, b: (a, None, b), lambda t: (t[0], t[2])),
    "with_float": (lambda a, b: (a, 0.5, b), lambda t: (t[0] * t[1], t[2])),
    "with_string": (lambda a, b: {"a": a, "b": b, "kind": "x"}, lambda t: (t["a"], t["b"])),
    "with_shape": (lambda a, b: (a, b, a.shape), lambda t: (t[0].view(t[2]), t[1])),
    "with_scalar": (lambda a, b: (a, b, a.mean()), lambda t: (t[0] * t[2], t[1])),
    "batch_second": (lambda a, b: (a.T.contiguous(), b), lambda t: (t[0].T, t[1])),
    "empty_list": (lambda a, b: (a, b, []), lambda t: (t[0], t[1])),
}


class Both(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Fields:
    a: Tensor
    b: Tensor


class Bag(dict):
    """Like the outputs of Hugging Face's models: keys are attributes, too."""

    def __getattr__(self, name):
        return self[name]


CLASSES = {
    "named_tuple": (lambda a, b: Both(a, b), lambda t: (t.a, t.b)),
    "dataclass": (lambda a, b: Fields(a, b), lambda t: (t.a, t.b)),
    "subclass_of_dict": (lambda a, b: Bag(a=a, b=b), lambda t: (t.a, t["b"])),
}

for name, way in {**PACKS, **NOT_ONLY_TENSORS, **CLASSES}.items():
    model(name=f"hands_on_{name}")(functools.partial(packed, *way))


def main_and_side(output, target):
    return F.cross_entropy(output["main"], target) + 0.3 * F.cross_entropy(output["side"], target)


@model(loss=main_and_side)
class DictionaryOut(nn.Module):
    """Two heads, one of them at half the way; the loss takes a dictionary."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle = nn.Linear(6, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.side, self.main = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        side = self.side(h)
        return {"main": self.main(self.middle(h)), "side": side}


def both_or_main(output, target):
    if isinstance(output, tuple):
        return F.cross_entropy(output[0], target) + 0.4 * F.cross_entropy(output[1], target)
    return F.cross_entropy(output, target)


@model(loss=both_or_main)
class HeadForTraining(nn.Module):
    """GoogLeNet's: a pair while training, one tensor in evaluation."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.side = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.main = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.enter(x)
        side = self.side(h) if self.training else None
        h = self.main(self.middle(h))
        return (h, side) if self.training else h


@model
class ManyContainers(nn.Module):
    """Parameters and modules in lists, dictionaries, slices, and under two names."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1.0 + i)) for i in range(3))
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.zeros(WIDTH)), "last": torch.ones(WIDTH)})
        self.layers = nn.ModuleList(nn.Linear(6 if i == 0 else WIDTH, WIDTH) for i in range(4))
        self.acts = nn.ModuleDict({"0": nn.Tanh(), "1": nn.GELU(), "2": nn.SiLU()})
        self.nest = nn.ModuleDict({"inner": nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())])})
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        h = self.layers[0](x)
        for i, (layer, scale) in enumerate(zip(self.layers[1:], self.scales, strict=True)):
            h = self.acts[str(i)](layer(h)) * scale
            if i == 0:
                h = h + self.shifts["first"]
        for layer in self.nest["inner"]:
            h = layer(h) + self.shifts.last
        return self.head(h)


@block
class ListOfParts(nn.Module):
    """Modules registered by hand, kept in a plain list, too."""

    def __init__(self):
        super().__init__()
        self.parts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        for i, part in enumerate(self.parts):
            self.add_module(f"part{i}", part)

    def forward(self, h):
        for part in self.parts:
            h = torch.tanh(part(h))
        return h


@model
class LastTwice(nn.Module):
    """One layer under two names, as ``self.head = self.layers[-1]`` leaves it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)])
        self.head = self.layers[-1]

    def forward(self, x):
        h = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        return self.head(h)


@model
class SharedTwice(nn.Sequential):
    """One layer at two places of a chain, and one matrix in two neighbours."""

    def __init__(self):
        shared, a, b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        b.weight = a.weight
        super().__init__(
            nn.Linear(6, WIDTH), nn.Tanh(), a, b, nn.Tanh(), shared, nn.Tanh(), shared, nn.Linear(WIDTH, 5)
        )


@model(data="pairs")
class Siamese(nn.Module):
    """One encoder for both halves of the input, then the distance."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x):
        left, right = self.encoder(x[:, 0]), self.encoder(x[:, 1])
        return self.head((left - right).abs())


@model
class OtherArguments(nn.Module):
    """Blocks with keyword arguments, defaults and several positional ones."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, *parts, gain=1.0, mask=None):
            h = self.a(parts[0]) + (self.b(parts[1]) if len(parts) > 1 else 0.0)
            return torch.tanh(h) * gain if mask is None else torch.tanh(h) * mask

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.one, self.two, self.three = self.Mix(), self.Mix(), self.Mix()

    def forward(self, x, scale=0.5):
        h = self.enter(x)
        y = self.one(h, gain=scale)
        z = self.two(h, y, mask=h > 0)
        return self.leave(self.three(z, y, gain=2.0))


@model
class ByMethods(nn.Module):
    """Children are called by methods of their own, not as functions."""

    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

        def encode(self, h):
            return torch.tanh(self.down(h))

        def decode(self, z):
            return self.up(z)

    def __init__(self):
        super().__init__()
        self.enter, self.codec, self.leave = nn.Linear(6, WIDTH), self.Codec(), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        z = self.codec.encode(self.enter.forward(x))
        return self.leave(self.codec.decode(z * 2))


@block
class AliasedParameters(nn.Module):
    """Registered, and kept in a plain list, too, which the forward reads."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.zeros(WIDTH))
        self.kept = [self.weight, self.bias]

    def forward(self, h):
        return torch.tanh(F.linear(h, *self.kept))


@block
class ClosureOverWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        weight = self.inner.weight
        self.penalty = lambda h: h * weight.mean()

    def forward(self, h):
        return self.inner(h) + self.penalty(h)


@model
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


class Named(nn.Parameter):
    """A subclass that its layer asks for."""


@block
class OwnKindOfParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Named(torch.randn(WIDTH, WIDTH) / 3)
        self.weight.gain = 1.5

    def forward(self, h):
        return F.linear(h, self.weight) * getattr(self.weight, "gain", 1.0)
