"""What losses average over, what is handed out with the micro-batches of a group, and which losses are no means."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.stage.loss import (
    SumCountLoss,
    check_is_mean,
    counted,
    is_known_mean,
    is_sum,
    loss_terms,
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
    [nn.CrossEntropyLoss(), nn.NLLLoss(), F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.1),
     Halved(weight=WEIGHT), nn.MSELoss(), nn.MultiMarginLoss(weight=WEIGHT), lambda out, target: out.sum()],
)  # fmt: skip
def test_of_other_losses_nothing_is_counted(loss_fn):
    assert loss_terms(loss_fn, IGNORING) is None


def test_a_loss_of_the_micro_batch_is_weighted_by_samples():
    for loss_fn, target in ((nn.CrossEntropyLoss(weight=WEIGHT), CLASSES), (nn.CrossEntropyLoss(), TOKENS)):
        assert loss_terms(loss_fn, target) is not None
        assert loss_terms(loss_fn, target, "batch") is None


def own(out, target):
    return out.mean()


def test_a_loss_can_say_itself_what_it_averages_over(monkeypatch):
    monkeypatch.setattr(own, "num_terms", lambda target: (target > 0).sum(), raising=False)
    for loss_fn in (own, functools.partial(own, target=None)):
        assert loss_terms(loss_fn, IGNORING).count(IGNORING) == 5.0
    said = nn.CrossEntropyLoss(weight=WEIGHT)
    said.num_terms = len
    assert loss_terms(said, IGNORING).count(IGNORING) == 6.0


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


def test_a_group_without_terms_is_weighted_by_its_samples():
    assert counts_of(Source(0, 0), [2]) == [[[0.5, 3]] * 3] * 2


def test_evaluation_counts_each_micro_batch_by_itself():
    assert counts_of(Source(2, 0), None) == [[[1, 2]] * 3, [[0, 0]] * 3]


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
NUMBERS = tuple(torch.rand(n, C) for n in SIZES)
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


@pytest.mark.parametrize(
    ("loss_fn", "outs", "targets"),
    [
        (nn.CrossEntropyLoss(weight=IN_SINGLE, label_smoothing=0.1), OUTS, OF_SIZES),
        (functools.partial(F.cross_entropy, weight=IN_SINGLE, ignore_index=1), OUTS, OF_SIZES),
        (masked, OF_TOKENS, PADDED),
        (masked, OF_TOKENS, (PADDED[0], torch.full_like(PADDED[1], -100))),
        (nn.BCELoss(), NUMBERS, NUMBERS),
        (by_hand, OUTS, OF_SIZES),
        (lambda out, target: by_hand(out["logits"], target), tuple({"logits": out} for out in OUTS), OF_SIZES),
        (lambda out, target: by_hand(out, target) * torch.rand(()), OUTS, OF_SIZES),
    ],
    ids=["torch's", "a partial", "its terms", "no terms", "numbers", "by hand", "named outputs", "random"],
)
def test_a_mean_over_samples_or_terms_passes(loss_fn, outs, targets):
    check(loss_fn, outs, targets)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, target: F.cross_entropy(out, target, weight=IN_SINGLE),
        lambda out, target: F.cross_entropy(out, target, ignore_index=2),
        lambda out, target: F.cross_entropy(out, target, reduction="sum"),
        lambda out, target: by_hand(out, target).sqrt(),
        contrastive,
    ],
    ids=["class weights", "ignore_index", "sum", "root", "contrastive"],
)
def test_a_loss_that_is_no_mean_is_refused(loss_fn):
    ways_out = r"num_terms\(target\), .*loss_reduction='batch'"
    with pytest.raises(ConfigError, match=rf"no mean over the samples: of 3 it is \S+, of 4 others .* {ways_out}"):
        check(loss_fn, OUTS, OF_SIZES)


def test_padding_that_is_not_declared_is_refused():
    with pytest.raises(ConfigError, match="no mean over the samples"):
        check(by_hand, OF_TOKENS, PADDED)


def test_terms_that_are_not_what_it_averages_over_are_refused(monkeypatch):
    monkeypatch.setattr(masked, "num_terms", lambda target: target.numel() + len(target) ** 2)
    with pytest.raises(ConfigError, match="no mean over the terms that it counts: of 27 it is"):
        check(masked, OF_TOKENS, PADDED)


def test_the_check_writes_to_no_target():
    before = [tensor.clone() for tensor in (*OUTS, *OF_SIZES)]
    check(writing, OUTS, OF_SIZES)
    assert all(map(torch.equal, before, (*OUTS, *OF_SIZES)))
