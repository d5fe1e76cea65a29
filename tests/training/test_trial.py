"""The comparison at the start: what it finds, what it names, and that nothing of the user's is moved by it."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

UNLIKE = "the stages do not compute as the uncut model: "
SHARED = "two stages share something in Python"


DATA = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 5)


def layers(*between):
    """Three layers, with ``between`` after each of them."""
    torch.manual_seed(0)
    widths = [8, 8, 8, 5]
    modules = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(m for pair in zip(modules, between, strict=False) for m in pair), *modules[len(between) :])


def fit(model, *, K=2, method="adl", batch_size=4, **options):
    trainer = toy_trainer(K, 1, method, model=model, **options)
    trainer.fit(DATA, epochs=1, batch_size=batch_size, monitoring=SILENT, max_updates=1)
    return trainer


# --- What it finds ---------------------------------------------------------------------------------------------------


class CountsInClass(nn.Module):
    calls = 0

    def forward(self, x):
        CountsInClass.calls += 1
        return x * (1 + CountsInClass.calls / 10)


def test_shared_state_is_found_and_the_first_unit_named():
    with pytest.raises(PartitionError, match=rf"{UNLIKE}the output differs by .* in the first micro-batch") as refusal:
        fit(layers(CountsInClass(), CountsInClass()), balance=["2"])
    first = f"the first module whose result differs is '1', right after '0'; likely cause: {SHARED}"
    assert first in str(refusal.value)


def test_a_backward_that_meets_replaced_weights_is_found():
    """Activation checkpointing computes again, with weights that are newer than those of its forward."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = layers(Again())
    with pytest.raises(PartitionError, match=r"a backward computes with its weights again.*method\(weights='stash'\)"):
        fit(model, options={"weights": "latest"}, balance=["2"])
    fit(model, balance=["2"])


class SharedMean(nn.Module):
    """Its buffer counts calls of all its objects."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        SharedMean.calls += 1
        self.seen.fill_(SharedMean.calls)
        return x


def test_a_buffer_that_differs_is_named():
    with pytest.raises(PartitionError, match=rf"{UNLIKE}the buffer '\d.seen' differs by .* after that.*{SHARED}"):
        fit(layers(SharedMean(), SharedMean()), balance=["2"])


# --- What is refused with its reason --------------------------------------------------------------------------------


class Hidden:
    """Nothing looks for a tensor in an object of this class."""

    def __init__(self, tensor):
        self.tensor = tensor


class Hides(nn.Module):
    def forward(self, x):
        return Hidden(x)


class DetachesSome(nn.Module):
    """Cuts the gradient off for micro-batches of four samples."""

    def forward(self, x):
        return x.detach() if len(x) == 4 else x


class Counts(nn.Module):
    def forward(self, h, parts):
        return h * len(parts)


class ListsSamples(nn.Module):
    """Hands a list with a tensor for each sample past the layers, in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers, self.count = layers(), Counts()

    def forward(self, x):
        if self.training:
            return self.layers(x)
        parts = [sample - sample.mean() for sample in x]
        return self.count(self.layers(x), parts)


def frozen():
    return layers().requires_grad_(False)


def blocks():
    return nn.Sequential(layers(), nn.Linear(5, 5))


SOMETIMES = r"cannot be cut after stage 0: stage 1 \(1 .. 3\) gives what it gets a gradient for some micro-batches only"
LISTS = "cannot be cut after stage 0: the number of tensors that cross it differs between micro-batches"
WITHIN = r"cut after '0.0': it lies inside a block \(PartitionSpec\(granularity='block'"
REFUSED = {
    "hidden output": (lambda: nn.Sequential(*layers(), Hides()), {}, "of class Hidden without a tensor that can be"),
    "frozen": (frozen, {}, "there is nothing to train"),
    "one sample": (lambda: layers(nn.BatchNorm1d(8)), {"batch_size": 1}, "training data holds 1 sample, and the model"),
    "detached": (lambda: layers(DetachesSome()), {"balance": ["1"]}, SOMETIMES),
    "list of samples": (ListsSamples, {"balance": ["layers.1"]}, LISTS),
    "inside a block": (blocks, {"balance": ["0.1"], "granularity": "block"}, WITHIN),
}


@pytest.mark.parametrize(("build", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_with_its_reason(build, options, message):
    with pytest.raises((ConfigError, PartitionError), match=message):
        fit(build(), **options)


# --- What it says and leaves alone -----------------------------------------------------------------------------------


class Views(nn.Module):
    """Lays images out as rows, which fails if channels are last in memory."""

    def forward(self, x):
        return x.view(len(x), -1)


@pytest.mark.parametrize("K", [1, 2])
def test_a_model_that_fails_with_channels_last_trains_without(K):
    note = "channels_last is off: the model runs in the plain memory format only"
    for layout, expected in ((Views(), [note]), (nn.Flatten(), [])):
        model = nn.Sequential(layout, nn.Linear(72, 8), nn.Linear(8, 5))
        trainer = toy_trainer(K, 1, "bp", model=model, balance="even", channels_last=None)
        trainer.fit(FixedImages(4), epochs=1, batch_size=4, monitoring=SILENT)
        assert [text for text in trainer._partitioned.notes if text.startswith("channels_last")] == expected


class Counting(nn.CrossEntropyLoss):
    """A loss with a state of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return super().forward(output, target)


class CountsAndDraws(nn.Module):
    """Counts its calls, and draws from all three streams."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes = 0, []

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        return x + random.random() + np.random.rand() + torch.rand(())


def test_nothing_of_the_users_is_moved():
    model, loss = layers(CountsAndDraws(), nn.BatchNorm1d(8), nn.Dropout(0.5)), Counting()

    class Look(adl_dist.Callback):
        def on_start(self, now):
            counts, gradients = model[1], [parameter.grad for parameter in model.parameters()]
            streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
            state = {name: t.tolist() for name, t in (*model.state_dict().items(), *loss.state_dict().items())}
            self.found = streams, state, counts.calls, counts.sizes[:], model.training, gradients

    before, after = Look(), Look()
    before.on_start(None)
    trainer = toy_trainer(2, 1, model=model, loss_fn=loss)
    trainer.fit(DATA, epochs=1, batch_size=4, callbacks=[after], monitoring=SILENT)
    assert after.found == before.found
    after.on_start(None)
    assert after.found != before.found, "training moves it"
