"""Memory that is written to again while a micro-batch is under way: a stage's own, or that of the data."""

import numpy as np
import pytest
import torch
from torch import nn

import adl_dist
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

DATA, VALIDATION = FixedImages(30), FixedImages(10, seed=1)


class InBuffer(nn.Module):
    """Frozen, and writes what it returns to memory that it keeps; ``copies``: and returns a copy of that."""

    def __init__(self, *, copies):
        super().__init__()
        self.copies = copies
        self.conv = nn.Conv2d(2, 2, 3, padding=1).requires_grad_(False)
        self.register_buffer("out", torch.zeros(16, 2, 6, 6), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.out[: len(x)].copy_(self.conv(x))
        out = self.out[: len(x)]
        return out.clone() if self.copies else out


class WithPrompt(nn.Module):
    """Hands on a view of a weight next to its output."""

    def __init__(self, *, copies):
        super().__init__()
        self.copies = copies
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.prompt = nn.Parameter(torch.randn(1, 2, 6, 6))

    def forward(self, x):
        prompt = self.prompt.expand(len(x), 2, 6, 6)
        return self.conv(x), prompt.clone() if self.copies else prompt


class AddsPrompt(nn.Module):
    def forward(self, both):
        return both[0] + both[1] * both[0].sigmoid()


def frozen_buffer(copies):
    torch.manual_seed(0)
    return nn.Sequential(InBuffer(copies=copies), *batch_norm_net())


def weight_on_its_way(copies):
    torch.manual_seed(0)
    return nn.Sequential(WithPrompt(copies=copies), AddsPrompt(), *batch_norm_net())


def fitted(model, K, method, options, **more):
    """Train with the stages of one process taking turns so that the first runs ahead as far as it may."""
    balance = [1] + [2] * (K - 2) + [len(model) - 1 - 2 * (K - 2)]
    fit = {name: more.pop(name) for name in ("loading",) if name in more}
    trainer = toy_trainer(K, 4, method, options, model=model, balance=balance if K > 1 else "even", **more)
    trainer.fit(DATA, val_dataset=VALIDATION, epochs=2, batch_size=12, monitoring=QUIET, shuffle=False, **fit)
    evaluated = {name: torch.as_tensor(value) for name, value in trainer.evaluate(VALIDATION, batch_size=3).items()}
    return trainer.full_state_dict() | evaluated


WAYS = [
    (2, "gpipe", {}), (2, "adl", {}), (3, "adl", {}), (3, "1f1b", {"split_backward": True}), (3, "fr", {}),
    (3, "adl", {"weights": "recompute"}), (3, "adl", {"weights": "latest"}),
]  # fmt: skip


@pytest.mark.parametrize(("K", "method", "options"), WAYS)
@pytest.mark.parametrize("model", [frozen_buffer, weight_on_its_way])
def test_a_stage_may_return_its_own_memory(model, K, method, options):
    assert_trained_like_a_copy(model, K, method, options)


def test_so_may_one_that_learns_from_its_own_head():
    assert_trained_like_a_copy(frozen_buffer, 3, "dgl", {"head": "linear", "buffer_size": 3})


def assert_trained_like_a_copy(model, K, method, options):
    found, expected = (fitted(model(copies), K, method, options, pick_next=min) for copies in (False, True))
    found.pop("0.out", None)
    expected.pop("0.out", None)
    assert_same(found, expected)


class OneBuffer:
    """Puts every micro-batch in the same memory."""

    def __init__(self):
        self.images, self.labels = np.zeros((3, 2, 6, 6), np.float32), torch.zeros(3, dtype=torch.int64)

    def __call__(self, samples):
        for place, (image, label) in enumerate(samples):
            self.images[place], self.labels[place] = image.numpy(), label
        return torch.from_numpy(self.images[: len(samples)]), self.labels[: len(samples)]


@pytest.mark.parametrize(("K", "method", "options"), [(1, "gpipe", {}), *WAYS])
def test_a_collate_fn_may_use_its_memory_again(K, method, options):
    expected, found = (
        fitted(batch_norm_net(), K, method, options, **({"loading": adl_dist.Loading(collate_fn=c)} if c else {}))
        for c in (None, OneBuffer())
    )
    assert_same(found, expected)
