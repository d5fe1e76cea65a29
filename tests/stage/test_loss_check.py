"""Which losses are means over samples, or over their terms, as two micro-batches tell."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.stage.loss_check import check_is_mean
from adl_dist.stage.loss_terms import loss_terms

C, T, SIZES = 5, 6, (3, 4)
WEIGHT = torch.linspace(0.2, 1.7, C)
torch.manual_seed(0)
OUTS = tuple(torch.randn(n, C) for n in SIZES)
ALIKE = tuple(torch.zeros(n, C) for n in SIZES)  # of a last layer that begins with zeros
OF_TOKENS = tuple(torch.randn(n, C, T) for n in SIZES)
CLASSES = tuple(torch.arange(n) % C for n in SIZES)
TOKENS = tuple((torch.arange(n * T).reshape(n, T) % C).index_fill(1, torch.arange(n - 1), -100) for n in SIZES)
NUMBERS = tuple(torch.rand(n, C) for n in SIZES)


def check(loss_fn, outs, targets):
    check_is_mean(loss_fn, outs, targets, loss_terms(loss_fn, targets[0]))


def by_hand(out, target):
    return F.cross_entropy(out, target)


def rounded(out, target):
    """Computes in float32, whatever it is given, and returns what it was given."""
    return F.cross_entropy(out.float(), target).to(out.dtype)


def strict(out, target):
    """Takes the outputs of the model, and no others."""
    assert any(torch.equal(out, real) for real in (*OUTS, torch.cat(OUTS)))
    return by_hand(out, target)


def contrastive(out, target):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def taken_at_its_word(out, target):
    return contrastive(out, target)


taken_at_its_word.num_terms = len


def masked(out, target):
    return F.cross_entropy(out, target)


masked.num_terms = lambda target: (target != -100).sum()


@pytest.mark.parametrize(
    ("loss_fn", "outs", "targets"),
    [
        (nn.CrossEntropyLoss(), OUTS, CLASSES),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), OUTS, CLASSES),
        (functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=1), OUTS, CLASSES),
        (nn.CrossEntropyLoss(), OF_TOKENS, TOKENS),
        (masked, OF_TOKENS, TOKENS),
        (nn.CrossEntropyLoss(weight=WEIGHT), OUTS, tuple(n / n.sum(1, keepdim=True) for n in NUMBERS)),
        (nn.MSELoss(), OUTS, NUMBERS),
        (nn.BCELoss(), NUMBERS, NUMBERS),
        (nn.MultiMarginLoss(weight=WEIGHT), OUTS, CLASSES),
        (by_hand, OUTS, CLASSES),
        (rounded, OUTS, CLASSES),
        (strict, OUTS, CLASSES),
        (lambda out, target: by_hand(out["logits"], target), tuple({"logits": out} for out in OUTS), CLASSES),
        (taken_at_its_word, OUTS, CLASSES),
    ],
)
def test_a_mean_over_samples_or_terms_passes(loss_fn, outs, targets):
    check(loss_fn, outs, targets)


@pytest.mark.parametrize("outs", [OUTS, ALIKE], ids=["outputs", "outputs that are all alike"])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, target: F.cross_entropy(out, target, weight=WEIGHT.to(out.dtype)),
        lambda out, target: F.cross_entropy(out, target, ignore_index=2),
        lambda out, target: F.cross_entropy(out, target, reduction="sum"),
        lambda out, target: by_hand(out, target).sqrt(),
        contrastive,
    ],
    ids=["class weights", "ignore_index", "sum", "root", "contrastive"],
)
def test_what_is_no_mean_is_refused(loss_fn, outs):
    told = (
        r"no mean over the samples: of 3 samples it is \S+, of 4 others .* num_terms\(target\), .*accumulation_steps=1"
    )
    with pytest.raises(ConfigError, match=told):
        check(loss_fn, outs, CLASSES)


def test_padding_that_is_not_declared_is_refused():
    with pytest.raises(ConfigError, match="no mean over the samples"):
        check(by_hand, OF_TOKENS, TOKENS)


def test_terms_that_are_not_what_it_averages_over_are_refused(monkeypatch):
    monkeypatch.setattr(masked, "num_terms", lambda target: target.numel() + len(target) ** 2)
    with pytest.raises(ConfigError, match="no mean over the terms that it counts: of 27 terms it is"):
        check(masked, OF_TOKENS, TOKENS)


def test_a_loss_of_pairs_is_told_what_it_fails_on():
    def of_pairs(out, target):
        return (out.reshape(len(out) // 2, 2, C).diff(dim=1) ** 2).mean()

    with pytest.raises(ConfigError, match=r"the loss fails on 3, 4 or all of these samples: RuntimeError: .*num_terms"):
        check(of_pairs, OUTS, CLASSES)


def test_a_loss_that_cannot_be_copied_is_not_asked():
    class Locked(Moving):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

    loss_fn = Locked()
    check(loss_fn, OUTS, CLASSES)
    assert loss_fn.calls == [0]


class Moving(nn.Module):
    """No mean, because it remembers; it counts its calls, and draws from every stream."""

    def __init__(self):
        super().__init__()
        self.calls = [0]
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, out, target):
        self.calls[0] += 1
        noise = torch.rand(()) + random.random() + np.random.rand()
        self.mean.lerp_(out.detach().float().mean(), 0.1)
        return by_hand(out, target) * self.mean + noise


def test_neither_a_loss_nor_a_random_stream_is_moved():
    loss_fn = Moving()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    check(loss_fn, OUTS, CLASSES)
    assert loss_fn.calls == [0]
    assert loss_fn.mean == 0
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
