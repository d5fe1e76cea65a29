"""What losses average over, what is handed out with the micro-batches of a group, and which losses are no means."""

import contextlib
import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.losses import ModelLoss, TokenCrossEntropy
from adl_dist.stage.loss import (
    SumCountLoss,
    check_is_mean,
    counted,
    is_known_mean,
    is_sum,
    loss_terms,
    try_loss,
)

C = 5
WEIGHT = torch.linspace(0.2, 1.7, C, dtype=torch.float64)
IGNORING = torch.tensor([1, 4, 2, 1, 0, 3])
CLASSES = torch.tensor([1, 4, -100, 0, 0, 3])
TOKENS = torch.tensor([[1, -100, 2], [-100, -100, -100], [0, 0, 4]])

COUNTED = [
    ({"ignore_index": 1}, IGNORING),
    ({"weight": WEIGHT}, IGNORING),
    ({"weight": WEIGHT}, CLASSES),
    ({"weight": WEIGHT, "ignore_index": 0}, IGNORING),
    ({}, TOKENS),
    ({"weight": WEIGHT, "ignore_index": 2}, TOKENS.clamp(min=0)),
]
SMOOTH = [({**options, "label_smoothing": 0.3}, target) for options, target in COUNTED]


class Derived(nn.CrossEntropyLoss):
    """With a name of its own alone."""


class Halved(nn.CrossEntropyLoss):
    def forward(self, out, target):
        return super().forward(out, target) / 2


def makers(options):
    made = [Derived, nn.CrossEntropyLoss, functools.partial(functools.partial, F.cross_entropy)]
    nll = [nn.NLLLoss, functools.partial(functools.partial, F.nll_loss)]
    return made if "label_smoothing" in options else made + nll


@pytest.mark.parametrize(("options", "target"), COUNTED + SMOOTH)
def test_the_terms_are_what_torch_divides_by(options, target):
    """The sum of a loss over its mean."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(len(target), C, *target.shape[1:], dtype=torch.float64, generator=generator)
    for make in makers(options):
        mean, total = make(**options), make(**options, reduction="sum")
        terms = loss_terms(mean, target).count(target)
        torch.testing.assert_close(mean(out, target) * terms, total(out, target), rtol=1e-13, atol=0)
        assert is_sum(total)
        assert not is_sum(mean)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), F.cross_entropy, Halved(weight=WEIGHT), nn.MSELoss(), lambda out, _: out.sum()],
)
def test_of_other_losses_nothing_is_counted(loss_fn):
    assert loss_terms(loss_fn, IGNORING) is None
    assert loss_terms(nn.CrossEntropyLoss(weight=WEIGHT), CLASSES, "batch") is None, "samples count"


# --- What goes with a micro-batch --------------------------------------------------------------------------


class Source:
    """Micro-batches with so many targets that count, and how many were loaded."""

    def __init__(self, *numbers):
        self.numbers, self.loaded, self.closed = numbers, 0, False

    def batches(self):
        try:
            for number in self.numbers:
                self.loaded += 1
                yield torch.zeros(3, 1), torch.tensor([1] * number + [0] * (3 - number))
        finally:
            self.closed = True


TERMS = loss_terms(nn.CrossEntropyLoss(ignore_index=0), IGNORING)


def counts_of(source, *arguments, **options):
    return [counts.tolist() for _, _, counts in counted(source.batches(), TERMS, *arguments, **options)]


def test_weights_are_shares_of_the_terms_of_the_group():
    counts = counts_of(Source(1, 0, 3, 2, 2), [3, 2])
    assert counts == [[[w, n]] * 3 for w, n in ((0.25, 1), (0, 0), (0.75, 3), (0.5, 2), (0.5, 2))]
    assert counts_of(Source(1, 3), [2], reduction="sum") == [[[1, 1]] * 3, [[1, 3]] * 3]
    assert counts_of(Source(0, 0), [2]) == [[[0.5, 3]] * 3] * 2, "of samples, where there are no terms"
    assert counts_of(Source(2, 0), None) == [[[1, 2]] * 3, [[0, 0]] * 3], "in evaluation each by itself"


def test_one_group_is_loaded_ahead_and_its_source_closed():
    source = Source(1, 2, 3, 1)
    batches = counted(source.batches(), TERMS, [2, 2])
    assert source.loaded == 0
    loaded = [next(batches) and source.loaded for _ in range(3)]
    assert loaded == [2, 2, 4]
    batches.close()
    assert source.closed


@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"weight": WEIGHT, "label_smoothing": 0.2}])
def test_the_loss_of_tokens_is_torchs_with_classes_last(options):
    target = TOKENS.clamp(min=0) if "ignore_index" in options else TOKENS
    out = torch.randn(*target.shape, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, torchs = TokenCrossEntropy(**options), nn.CrossEntropyLoss(**options)
    torch.testing.assert_close(ours(out, target), torchs(out.transpose(1, 2), target), rtol=1e-12, atol=0)
    assert loss_terms(ours, target).count(target) == loss_terms(torchs, target).count(target)
    assert is_known_mean(ours)
    assert not is_known_mean(type("Own", (TokenCrossEntropy,), {})(**options))  # it may do anything


class Positive(nn.Module):
    """A loss of (sum, count), whose count is ``wrong`` more than the number of its terms."""

    def __init__(self, wrong=0, own=True, number=torch.tensor):
        super().__init__()
        self.wrong, self.number = wrong, number
        if own:
            self.num_terms = lambda target: (target > 0).sum()

    def forward(self, out, target):
        return out.sum(), self.number(4.0 if not hasattr(self, "num_terms") else 3.0) + self.wrong


@pytest.mark.parametrize("number", [torch.tensor, float])
@pytest.mark.parametrize("own", [True, False])
def test_a_mean_over_another_number_is_refused_or_nan(own, number):
    """No test has a GPU: the target says that it is on one."""
    target, out = torch.tensor([0, 1, 2, 3]), torch.ones(6)
    on_gpu = type("OnGpu", (torch.Tensor,), {"is_cuda": True})
    loss_fn = Positive(own=own, number=number)
    terms = 3 if own else 4
    mean = SumCountLoss(loss_fn, target, terms)
    with pytest.raises(ConfigError, match=r"with count 9, but the targets have as .*: give the loss a num_terms"):
        SumCountLoss(loss_fn, target, 9)
    there = target.as_subclass(on_gpu)
    assert float(mean(out, there, float(terms))) == float(mean(out, target, float(terms))) == 6 / terms
    loss_fn.wrong = 1
    assert mean(out, there, float(terms)).isnan()
    with pytest.raises(ConfigError, match=rf"with count {terms + 1} for a micro-batch, but its targets have {terms} "):
        mean(out, target, float(terms))


# --- Checks at the start -----------------------------------------------------------------------------------------


T, SIZES = 6, (3, 4)
torch.manual_seed(0)
OUTS = tuple(torch.randn(n, C) for n in SIZES)
OF_TOKENS = tuple(torch.randn(n, C, T) for n in SIZES)
OF_SIZES = tuple(torch.arange(n) % C for n in SIZES)
PADDED = tuple((torch.arange(n * T).reshape(n, T) % C).index_fill(1, torch.arange(n - 1), -100) for n in SIZES)
IN_SINGLE = WEIGHT.float()


def check(loss_fn, outs, targets):
    check_is_mean(1, loss_fn, outs, targets, loss_terms(loss_fn, targets[0]))


def by_hand(out, target):
    return F.cross_entropy(out, target)


def contrastive(out, target):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def masked(out, target):
    return F.cross_entropy(out, target)


masked.num_terms = lambda target: (target != -100).sum()


def writing(out, target):
    return F.cross_entropy(out, target.add_(1).remainder_(C))


def miscounted(out, target):
    return F.cross_entropy(out, target)


miscounted.num_terms = lambda target: target.numel() + len(target) ** 2


class Output(NamedTuple):
    logits: torch.Tensor


@pytest.mark.parametrize(("loss_fn", "advises_own"), [(nn.CrossEntropyLoss(), True), (ModelLoss(), False)])
def test_of_an_output_with_logits_another_loss_is_advised(loss_fn, advises_own):
    with pytest.raises(ConfigError, match=r"let the loss take output\.logits") as told:
        try_loss(1, "it", Output(logits=torch.zeros(2, 3)), torch.zeros(2, dtype=torch.long), loss_fn)
    assert ("use the model's own" in str(told.value)) == advises_own


def test_a_loss_that_pairs_all_with_all_is_refused():
    """Also one with a single micro-batch, of which nothing is compared."""
    out, target = torch.randn(4, 1), torch.randn(4)
    for loss_fn in (nn.PoissonNLLLoss(), lambda out, target: (out - target).square().mean()):
        with pytest.raises(ConfigError, match=r"returns \[B, 1\], but the targets are \[B\], and the loss pairs every"):
            try_loss(1, "it", out, target, loss_fn)
    assert try_loss(1, "it", out, target, lambda out, target: (out.view(-1) - target).square().mean()) > 0


NO_MEAN = r"no mean over the samples: of 3 it is \S+, of 4 others .* num_terms\(target\), .*loss_reduction='batch'"
# Each with a loss, outputs, targets, and the refusal.
CHECKED = {
    "torch's": (nn.CrossEntropyLoss(weight=IN_SINGLE, label_smoothing=0.1), OUTS, OF_SIZES, None),
    "a partial": (functools.partial(F.cross_entropy, weight=IN_SINGLE, ignore_index=1), OUTS, OF_SIZES, None),
    "its terms": (masked, OF_TOKENS, PADDED, None),
    "no terms": (masked, OF_TOKENS, (PADDED[0], torch.full_like(PADDED[1], -100)), None),
    "by hand": (by_hand, OUTS, OF_SIZES, None),
    "named": (lambda out, y: by_hand(out["logits"], y), tuple({"logits": out} for out in OUTS), OF_SIZES, None),
    "random": (lambda out, target: by_hand(out, target) * torch.rand(()), OUTS, OF_SIZES, None),
    "writing": (writing, OUTS, OF_SIZES, None),
    "class weights": (lambda out, y: F.cross_entropy(out, y, weight=IN_SINGLE), OUTS, OF_SIZES, NO_MEAN),
    "ignored": (lambda out, y: F.cross_entropy(out, y, ignore_index=2), OUTS, OF_SIZES, NO_MEAN),
    "contrastive": (contrastive, OUTS, OF_SIZES, NO_MEAN),
    "padding": (by_hand, OF_TOKENS, PADDED, "no mean over the samples"),
    "alike": (by_hand, tuple(0.02 * out for out in OF_TOKENS), PADDED, "no mean over the samples"),
    "a difference": (lambda out, target: (out + 30).mean() - (out * 0 + 30).mean(), OUTS, OF_SIZES, None),
    "other terms": (miscounted, OF_TOKENS, PADDED, "no mean over the terms that it counts: of 27 it is"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_only_a_mean_over_samples_or_terms_passes(case):
    """And nothing is written to outputs and targets."""
    loss_fn, outs, targets, told = CHECKED[case]
    before = [tensor.clone() for tensor in (*OUTS, *OF_SIZES)]
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        check(loss_fn, outs, targets)
    assert all(map(torch.equal, before, (*OUTS, *OF_SIZES)))


@pytest.mark.parametrize(("num_terms", "told"), [(lambda _: -1, "returned -1.0"), (len, "fails: TypeError: len")])
def test_terms_that_cannot_be_counted_are_refused(num_terms, told):
    loss_fn = Positive()
    loss_fn.num_terms = num_terms
    with pytest.raises(ConfigError, match=rf"the loss's num_terms {told}.*; it is given the targets .* int64\[\], and"):
        loss_terms(loss_fn, torch.tensor(1)).count(torch.tensor(1))
