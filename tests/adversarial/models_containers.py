"""What blocks return and modules are kept in; parameters with several references."""

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.cases import NUM_CLASSES, WIDTH, block, chain, linear, model, model_of, several, weight


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
    return nn.Sequential(Fork(pack, 6), *(Middle(pack, take) for _ in range(4)), Join(take))


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


# How two values are packed and taken apart again. Some ways change from one micro-batch to the next.
PACKS = {
    "pair": (lambda a, b: (a, b), lambda t: t),
    "nested_tuple": (lambda a, b: (a, (b, a.sum(1))), lambda t: (t[0], t[1][0] * t[1][1][:, None])),
    "ordered_dictionary": (lambda a, b: OrderedDict(z=a, b=b), lambda t: (t["z"], t["b"])),
    "dictionary_of_lists": (lambda a, b: {"both": [a, b], "sum": (a.sum(1),)}, lambda t: t["both"]),
    "same_tensor_twice": (lambda a, b: (a, a, b), lambda t: (t[0] * 0.5, t[1] + t[2])),
    "twin_in_a_list": (lambda a, b: (lambda y: (y, [y]))(a + b), lambda t: (t[0], t[1][0])),
    "with_integers": (lambda a, b: (a, b, a.argmax(1)), lambda t: (t[0], t[1] + F.one_hot(t[2], WIDTH))),
    "part_of_another": (lambda a, b: (a, b, b[:, :4]), lambda t: (t[0], t[1] + t[2].repeat(1, 2))),
    "transposed": (lambda a, b: (a[:, :, None].expand(-1, -1, 3).transpose(1, 2), b), lambda t: (t[0].mean(1), t[1])),
    "complex": (lambda a, b: torch.complex(a, b), lambda z: (z.real, z.imag.abs())),
    "float32": (lambda a, b: (a.float(), b), lambda t: (t[0].double(), t[1])),
    "with_none": (lambda a, b: (a, None, b), lambda t: (t[0], t[2])),
    "with_float": (lambda a, b: (a, 0.5, b), lambda t: (t[0] * t[1], t[2])),
    "with_string": (lambda a, b: {"a": a, "b": b, "kind": "x"}, lambda t: (t["a"], t["b"])),
    "with_shape": (lambda a, b: (a, b, a.shape), lambda t: (t[0].view(t[2]), t[1])),
    "batch_second": (lambda a, b: (a.T.contiguous(), b), lambda t: (t[0].T, t[1])),
    "named_tuple": (lambda a, b: Both(a, b), lambda t: (t.a, t.b)),
    "dataclass": (lambda a, b: Fields(a, b), lambda t: (t.a, t.b)),
    "subclass_of_dict": (lambda a, b: Bag(a=a, b=b), lambda t: (t.a, t["b"])),
    "changing_float": (lambda a, b: (a, b, float(a.detach().mean())), lambda t: (t[0] * (1 + t[2]), t[1])),
    "batch_size": (lambda a, b: (a, b, len(a)), lambda t: (t[0] / t[2], t[1])),
    "changing_structure": (
        lambda a, b: (a, b) if len(a) == 3 else {"a": a, "b": b},
        lambda t: (t[0], t[1]) if isinstance(t, tuple) else (t["a"], t["b"] * 2),
    ),
    "changing_width": (lambda a, b: (a, b[:, : 4 + len(a)]), lambda t: (t[0], F.pad(t[1], (0, WIDTH - t[1].shape[1])))),
    "changing_dtype": (
        lambda a, b: (a, b if float(a.detach().sum()) > 0 else b.float()), lambda t: (t[0], t[1].double() * 2)
    ),
    "list_of_samples": (lambda a, b: [*a.unbind(0), b], lambda t: (torch.stack(list(t[:-1])), t[-1])),
    "sometimes_none": (
        lambda a, b: (a, b if len(a) == 3 else None), lambda t: (t[0], t[0] * 2 if t[1] is None else t[1])
    ),
    "changing_order": (
        lambda a, b: {"a": a, "b": b} if len(a) == 3 else {"b": b, "a": a},
        lambda t: (next(iter(t.values())), t["b"]),
    ),
}  # fmt: skip

for name, way in PACKS.items():
    model_of(name=f"hands_on_{name}")(functools.partial(packed, *way))


@model(enter=chain(linear(6), lambda: nn.BatchNorm1d(WIDTH), nn.ReLU), middle=chain(linear(), nn.ReLU),
       side=chain(linear(), nn.ReLU, linear(WIDTH, NUM_CLASSES)), main=linear(WIDTH, NUM_CLASSES))  # fmt: skip
def head_for_training(self, x):
    """GoogLeNet's: a pair while training, one tensor in evaluation."""
    h = self.enter(x)
    side = self.side(h) if self.training else None
    h = self.main(self.middle(h))
    return (h, side) if self.training else h


@model(
    scales=lambda: nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1.0 + i)) for i in range(3)),
    shifts=lambda: nn.ParameterDict({"first": nn.Parameter(torch.zeros(WIDTH)), "last": torch.ones(WIDTH)}),
    layers=lambda: nn.ModuleList(nn.Linear(6 if i == 0 else WIDTH, WIDTH) for i in range(4)),
    acts=lambda: nn.ModuleDict({"0": nn.Tanh(), "1": nn.GELU(), "2": nn.SiLU()}),
    nest=lambda: nn.ModuleDict({"inner": several(1, chain(linear(), nn.ReLU))()}),
    head=linear(WIDTH, NUM_CLASSES),
)
def many_containers(self, x):
    """Parameters and modules in lists, dictionaries, slices, and under two names."""
    h = self.layers[0](x)
    for i, (layer, scale) in enumerate(zip(self.layers[1:], self.scales, strict=True)):
        h = self.acts[str(i)](layer(h)) * scale
        if i == 0:
            h = h + self.shifts["first"]
    for layer in self.nest["inner"]:
        h = layer(h) + self.shifts.last
    return self.head(h)


@model_of()
def shared_twice():
    """One layer at two places of a chain, and one matrix in two neighbours."""
    shared, a, b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    b.weight = a.weight
    first, last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
    return nn.Sequential(first, nn.Tanh(), a, b, nn.Tanh(), shared, nn.Tanh(), shared, last)


@model("pairs", encoder=chain(linear(6), lambda: nn.BatchNorm1d(WIDTH), nn.Tanh, linear()),
       head=chain(linear(), nn.ReLU, linear(WIDTH, NUM_CLASSES)))  # fmt: skip
def siamese(self, x):
    """One encoder for both halves of the input, then the distance."""
    left, right = self.encoder(x[:, 0]), self.encoder(x[:, 1])
    return self.head((left - right).abs())


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *parts, gain=1.0, mask=None):
        h = self.a(parts[0]) + (self.b(parts[1]) if len(parts) > 1 else 0.0)
        return torch.tanh(h) * gain if mask is None else torch.tanh(h) * mask


@model(enter=linear(6), leave=linear(WIDTH, NUM_CLASSES), one=Mix, two=Mix, three=Mix)
def other_arguments(self, x, scale=0.5):
    """Blocks with keyword arguments, defaults and several positional ones."""
    h = self.enter(x)
    y = self.one(h, gain=scale)
    z = self.two(h, y, mask=h > 0)
    return self.leave(self.three(z, y, gain=2.0))


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def encode(self, h):
        return torch.tanh(self.down(h))

    def decode(self, z):
        return self.up(z)


@model(enter=linear(6), codec=Codec, leave=linear(WIDTH, NUM_CLASSES))
def by_methods(self, x):
    """Children are called by methods of their own, not as functions."""
    z = self.codec.encode(self.enter.forward(x))
    return self.leave(self.codec.decode(z * 2))


class Untied(nn.Module):
    """Uses the weight of a layer that it keeps in a plain list."""

    def __init__(self, embed):
        super().__init__()
        self.tied = [embed]
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, h):
        return F.linear(h, self.tied[0].weight.t(), self.bias)


@model_of()
class HiddenTie(nn.Module):
    """The classifier of the last layer is the embedding, by a plain list."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH, bias=False)
        self.layers = chain(nn.Tanh, linear(), nn.Tanh, linear())()
        self.last = Untied(self.embed)

    def forward(self, x):
        return self.last(self.layers(self.embed(x)))


class Named(nn.Parameter):
    """A subclass that its layer asks for."""


def named():
    parameter = Named(weight(WIDTH, WIDTH)())
    parameter.gain = 1.5
    return parameter


@block(weight=named)
def own_kind_of_parameter(self, h):
    return F.linear(h, self.weight) * getattr(self.weight, "gain", 1.0)
