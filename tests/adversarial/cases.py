"""The table of odd models: how to build each, and what it takes."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, VOCABULARY, TIME, NUM_CLASSES = 8, 11, 7, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """An odd model.

    Attributes:
        varies: inputs may have several lengths, or heights.
        size: samples of a micro-batch.
    """

    name: str
    build: Callable[[], nn.Module]
    data: str = "vectors"
    varies: bool = True
    size: int = 3

    def model(self):
        """Return a new model, the same every time; all global streams begin again."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return self.build().double()

    def batches(self):
        """Return four micro-batches of different sizes, and of different lengths if it takes them."""
        sizes = (8, 7, 5, 8) if self.size == 8 else (3, 2, 4, 3)
        inputs = inputs_of(self.data, sum(sizes)).split(sizes)
        if not self.varies or self.data in ("vectors", "pairs"):
            return list(inputs)
        if self.data.endswith("images"):
            return [x[:, :, : x.shape[2] - less] for x, less in zip(inputs, (0, 2, 2, 0), strict=True)]
        return [x[:, : TIME - less] for x, less in zip(inputs, (0, 2, 1, 0), strict=True)]

    def dataset(self):
        """Return samples for a trainer; the last micro-batch is smaller."""
        inputs = inputs_of(self.data, 23)
        return TensorDataset(inputs, torch.zeros(len(inputs)))


def inputs_of(kind, num_samples):
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(VOCABULARY, (num_samples, TIME), generator=draw)
    numbers = torch.randn(num_samples, 432, generator=draw, dtype=torch.float64)
    return {
        "vectors": numbers[:, :6],
        "tokens": words,
        "images": numbers[:, : 3 * 36].reshape(-1, 3, 6, 6),
        "big_images": numbers.reshape(-1, 3, 12, 12),
        "pairs": numbers[:, :12].reshape(-1, 2, 6),
        "late_tokens": words.clamp(min=1),  # token 0 never comes
    }[kind]


# --- Registration ------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}


def model_of(data="vectors", *, name=None, **options):
    """Register what builds a whole model."""

    def register(build):
        case = Case(name=name or snake(build.__name__), build=build, data=data, **options)
        assert case.name not in CASES, case.name
        CASES[case.name] = case
        return build

    return register


def block_of(data="vectors", *, name=None, **options):
    """Register what builds a block, which stands twice in a chain of six units."""

    def register(build):
        of_chain = functools.partial(CHAINS[data], build)
        model_of(data, name=name or snake(build.__name__), **options)(of_chain)
        return build

    return register


def model(data="vectors", *, varies=True, size=3, **parts):
    """Register a model by its forward and its ``parts``: modules, parameters and buffers, each by what makes it."""
    options = {"varies": varies, "size": size}
    return lambda forward: model_of(data, name=forward.__name__, **options)(with_forward(forward, parts))


def block(data="vectors", *, varies=True, size=3, **parts):
    """Register a block in the same way; without parts it has a linear layer ``inner``."""
    options = {"varies": varies, "size": size}
    made_of = parts or {"inner": linear()}
    return lambda forward: block_of(data, name=forward.__name__, **options)(with_forward(forward, made_of))


def with_forward(forward, parts):
    """Return what builds a module of a class of its own."""
    kind = type(forward.__name__, (nn.Module,), {"forward": forward, "__module__": forward.__module__})

    def build():
        module = kind()
        for name, make in parts.items():
            setattr(module, name, make())
        return module

    return build


def snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


# --- Parts -------------------------------------------------------------------------------------------------------


def linear(num_in=WIDTH, num_out=WIDTH, **options):
    return functools.partial(nn.Linear, num_in, num_out, **options)


def embedding(**options):
    return functools.partial(nn.Embedding, VOCABULARY, WIDTH, **options)


def weight(*shape, scale=3.0):
    return lambda: nn.Parameter(torch.randn(shape) / scale)


def buffer(make, **options):
    return lambda: nn.Buffer(make(), **options)


def several(num, make):
    return lambda: nn.ModuleList(make() for _ in range(num))


def chain(*makes):
    return lambda: nn.Sequential(*(make() for make in makes))


class Inner(nn.Module):
    """A block with a child."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


# --- Chains of six units: the third and the fifth one is an odd block ----------------------------------------------


class Mean(nn.Module):
    """The mean over time, or over places."""

    def forward(self, h):
        return h.mean(dim=1 if h.ndim == 3 else (2, 3))


def vectors(odd):
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), odd(), nn.Linear(WIDTH, WIDTH), odd(), nn.Linear(WIDTH, 5))


def tokens(odd):
    last = nn.Sequential(Mean(), nn.Linear(WIDTH, NUM_CLASSES))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), odd(), nn.Linear(WIDTH, WIDTH), odd(), last)


def images(odd):
    convs = [nn.Conv2d(channels, 4, 3, padding=1) for channels in (3, 4)]
    return nn.Sequential(convs[0], nn.Tanh(), odd(), convs[1], odd(), nn.Sequential(Mean(), nn.Linear(4, NUM_CLASSES)))


CHAINS = {"vectors": vectors, "tokens": tokens, "images": images}
