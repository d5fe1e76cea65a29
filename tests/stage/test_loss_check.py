"""Which losses are means over samples, or over their terms, as two micro-batches tell."""

import functools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.stage.loss_check import MeanGuard, check_is_mean, check_many, num_made_up, put_together
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


MEANS = pytest.mark.parametrize(
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


@MEANS
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


def test_a_loss_that_cannot_be_copied_is_asked_itself():
    class Locked(nn.Module):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

        def forward(self, out, target):
            return contrastive(out, target)

    with pytest.raises(ConfigError, match="no mean over the samples"):
        check(Locked(), OUTS, CLASSES)


def test_a_gradient_that_is_another_is_told_by_its_values():
    def of_signs(out, target):
        return out.sum(1).mean() - (out - out.detach()).sum() / len(out) ** 2

    with pytest.raises(ConfigError, match=r"of all of them (\S+), but an output gets the gradient \S+ instead of \S+;"):
        check(of_signs, OUTS, CLASSES)


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


# --- Many targets, and a look in training -----------------------------------------------------------------------

MANY = 256


def rarely(num):
    """Classes [num], of which only the last tenth has some of class 0."""
    classes = torch.arange(num) % (C - 1) + 1
    classes[-num // 10 :: 3] = 0
    return classes


def without_0(out, target):
    return F.cross_entropy(out, target, ignore_index=0)


def pairs(out, target):
    return (out.reshape(len(out) // 2, 2, C).diff(dim=1) ** 2).mean()


@MEANS
def test_many_samples_of_a_mean_pass(loss_fn, outs, targets):
    target = torch.cat(targets)[torch.arange(MANY) % sum(SIZES)]
    check_many(loss_fn, put_together(outs), target, loss_terms(loss_fn, target))


def test_a_rare_target_is_seen_among_many():
    target = rarely(MANY)
    check(without_0, OUTS, (target[:3], target[3:7]))
    with pytest.raises(ConfigError, match=r"no mean over the samples: .* seen in the targets of the first 256 samples"):
        check_many(without_0, torch.cat(OUTS), target, None)


@pytest.mark.parametrize("loss_fn", [strict, lambda out, target: 1 / 0])
def test_a_loss_that_takes_no_made_up_outputs_is_not_judged(loss_fn):
    check_many(loss_fn, torch.cat(OUTS), rarely(MANY), None)


def test_outputs_are_made_up_only_as_far_as_there_is_memory():
    assert num_made_up({"logits": torch.zeros(7, 10), "number": 3}) > MANY
    assert num_made_up(torch.zeros(7, 1024, 1024)) == 8


def guard_of(loss_fn):
    return MeanGuard.of(loss_fn, nullcontext, "stage 3")


def looked_at(loss_fn, targets):
    """Look at one micro-batch for each of the targets."""
    guard, generator = guard_of(loss_fn), torch.Generator().manual_seed(0)
    for target in targets:
        guard.look(torch.randn(len(target), C, generator=generator), target)


def halving_0(out, target):
    return F.cross_entropy(out, target, weight=torch.tensor([0.5, *[1.0] * (C - 1)], dtype=out.dtype))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_rare_target_is_seen_in_training(size):
    late = [(torch.arange(size) + n) % C if n > 300 else torch.ones(size, dtype=torch.long) for n in range(600)]
    with pytest.raises(ConfigError, match=r"stage 3: the loss is no mean over the samples: .*no sample at the start"):
        looked_at(halving_0, late)
    looked_at(by_hand, late)


def test_of_terms_that_it_counts_a_guard_knows():
    def counting(out, target):
        return without_0(out, target)

    counting.num_terms = lambda target: (target != 0).sum()
    looked_at(counting, rarely(1000).split(4))
    counting.num_terms = lambda target: (target != 1).sum()
    with pytest.raises(ConfigError, match="no mean over the terms that it counts"):
        looked_at(counting, rarely(1000).split(5))


def test_a_guard_is_silent_about_what_it_cannot_compare():
    looked_at(pairs, [torch.zeros(3, dtype=torch.long)] * 100)
    looked_at(lambda out, target: by_hand(out, target) * torch.rand(()), [*rarely(1000).split(4)])
    looked_at(taken_at_its_word, [*rarely(1000).split(4)])


def test_a_guard_looks_rarely_and_not_at_losses_of_torch():
    calls = 0

    def counted(out, target):
        nonlocal calls
        calls += 1
        return by_hand(out, target)

    looked_at(counted, [torch.ones(4, dtype=torch.long)] * 6400)
    assert calls <= 4 * (100 + 8), "4 calls, for every 64th micro-batch, and some of the first"
    for loss_fn in (nn.CrossEntropyLoss(weight=WEIGHT), F.mse_loss, functools.partial(F.nll_loss, ignore_index=0)):
        assert guard_of(loss_fn) is None
    assert guard_of(masked) is not None
