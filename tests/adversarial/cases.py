"""The table of odd models: what each is, and what must become of it at K = 1, 2, 3, 5."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

STAGES = {1: 1, 2: 2, 3: 1, 5: 2}  # K, and the M that goes with it
MICRO_BATCH, NUM_SAMPLES, NUM_VALIDATION, EPOCHS = 3, 23, 7, 2  # 8 micro-batches, the last one of 2
WIDTH, VOCABULARY, TIME, NUM_CLASSES = 8, 11, 7, 5

sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=2e-2)
# A large eps, or rounding errors of a gradient that is zero would become steps of full length.
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An odd model.

    Attributes:
        word: what a refusal must say, as a regular expression.
        random: ``torch``: draws from torch's stream, which the oracle replays; ``other``: two runs must be equal.
        varies: inputs may have several lengths, or heights.
        run: more arguments for the trainer.
        size: samples of a micro-batch.
        counts: samples to train and to validate with.
        ignores: buffers that are not compared, as a regular expression; nor is the evaluation, then.
    """

    name: str
    build: Callable[[], nn.Module]
    word: str = ""
    data: str = "vectors"
    loss: Callable = nn.functional.cross_entropy
    count: Callable | None = None
    optimizer: Callable = sgd
    random: str = ""
    varies: bool = True
    run: dict = field(default_factory=dict)
    ignores: str = ""
    size: int = MICRO_BATCH
    counts: tuple = (NUM_SAMPLES, NUM_VALIDATION)

    def model(self):
        """A new model, the same every time, and all global streams as at the start."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return self.build().double()

    def batches(self):
        """Four micro-batches of different sizes, and lengths, if it takes them."""
        sizes = (8, 6, 8, 4) if self.counts[0] % 2 == 0 else (8, 7, 5, 8) if self.size == 8 else (3, 2, 4, 3)
        inputs = dataset(self.data, sum(sizes), 1).tensors[0].split(sizes)
        if not self.varies or self.data in ("vectors", "pairs", "regression"):
            return list(inputs)
        if self.data.endswith("images"):
            return [x[:, :, : x.shape[2] - less] for x, less in zip(inputs, (0, 2, 2, 0), strict=True)]
        return [x[:, : TIME - less] for x, less in zip(inputs, (0, 2, 1, 0), strict=True)]


CASES: dict[str, Case] = {}


def add(case):
    assert case.name not in CASES, case.name
    CASES[case.name] = case


def model(build=None, *, name=None, **options):
    """Register a class or function that makes a whole model."""
    if build is None:
        return functools.partial(model, name=name, **options)
    add(Case(name=name or snake(build.__name__), build=build, **options))
    return build


def block(build=None, **options):
    """Register a class or function that makes a block, which stands twice in a chain of six units."""
    if build is None or isinstance(build, str):
        return functools.partial(block, **options, **({"data": build} if build else {}))
    chain = CHAINS[options.get("data", "vectors")]
    add(Case(name=snake(build.__name__), build=functools.partial(chain, build), **options))
    return build


def forward_block(forward=None, **options):
    """Register a block with a linear layer ``inner``, by its forward."""
    if forward is None:
        return functools.partial(forward_block, **options)
    members = {"forward": forward, "__doc__": forward.__doc__, "__module__": forward.__module__}
    name = forward.__name__.title().replace("_", "")
    add(Case(name=forward.__name__, build=functools.partial(vectors, type(name, (Inner,), members)), **options))
    return forward


def snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


# --- Chains of six units: in the third and the fifth is an odd block ---------------------------------------------


class Inner(nn.Module):
    """A block with a child, so that it is traced at granularity=layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class MeanOfTime(nn.Module):
    def forward(self, h):
        return h.mean(dim=1)


class MeanOfPlace(nn.Module):
    def forward(self, h):
        return h.mean(dim=(2, 3))


def vectors(odd):
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), odd(), nn.Linear(WIDTH, WIDTH), odd(), nn.Linear(WIDTH, 5))


def tokens(odd):
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), odd(), nn.Linear(WIDTH, WIDTH), odd(),
        nn.Sequential(MeanOfTime(), nn.Linear(WIDTH, NUM_CLASSES)),
    )  # fmt: skip


def images(odd):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), odd(), nn.Conv2d(4, 4, 3, padding=1), odd(),
        nn.Sequential(MeanOfPlace(), nn.Linear(4, NUM_CLASSES)),
    )  # fmt: skip


CHAINS = {"vectors": vectors, "tokens": tokens, "images": images}


def six_units():
    layers = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))


def with_norm():
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )  # fmt: skip


def case_of(build=six_units, **changes):
    """A case that is in no table."""
    return Case(name="edge", build=build, **changes)


# --- Data --------------------------------------------------------------------------------------------------------


@functools.cache
def dataset(kind, num_samples, seed):
    """Samples whose every number is fixed."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (num_samples,), generator=draw)
    of_time = torch.randint(NUM_CLASSES, (num_samples, TIME), generator=draw)
    words = torch.randint(VOCABULARY, (num_samples, TIME), generator=draw)
    numbers = torch.randn(num_samples, 512, generator=draw, dtype=torch.float64)
    inputs = {
        "vectors": numbers[:, :6],
        "tokens": words,
        "images": numbers[:, : 3 * 36].reshape(-1, 3, 6, 6),
        "big_images": numbers[:, : 3 * 144].reshape(-1, 3, 12, 12),
        "pairs": numbers[:, :12].reshape(-1, 2, 6),
        "series": numbers[:, : TIME * 6].reshape(-1, TIME, 6),
        "tagged": words,
        "late_tokens": words.clamp(min=1),  # token 0 never comes
        "regression": numbers[:, :6],
    }[kind]
    targets = {"tagged": of_time, "regression": numbers[:, -3:]}.get(kind, classes)
    return TensorDataset(inputs, targets)


def batches(kind, num_samples, seed, size=MICRO_BATCH):
    inputs, targets = dataset(kind, num_samples, seed).tensors
    return list(zip(inputs.split(size), targets.split(size), strict=True))
