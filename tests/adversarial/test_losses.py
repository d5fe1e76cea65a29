"""Losses of users: those that train nothing, average over something else than samples, or write."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.errors import ConfigError
from tests.adversarial.cases import EPOCHS, NUM_CLASSES, NUM_SAMPLES, WIDTH, batches, case_of, dataset, sgd, six_units
from tests.adversarial.harness import (
    TOLERANCE,
    expected,
    fit,
    oracle_of,
    owner_of,
    refused,
    trainer_of,
    unlike,
    variant,
)
from tests.support.tiers import grid
from tests.support.values import SILENT, values

pytestmark = pytest.mark.filterwarnings("ignore")

# --- Nothing to train (W13), strange losses (C8) ---------------------------------------------------------------


def all_frozen():
    return six_units().requires_grad_(False)


NOTHING = {
    "loss without a graph": case_of(loss=lambda out, target: F.cross_entropy(out.detach(), target)),
    "a loss of numbers": case_of(loss=lambda out, target: torch.tensor(1.0, dtype=torch.float64)),
    "a float": case_of(loss=lambda out, target: float(F.cross_entropy(out, target))),
    "a tuple": case_of(loss=lambda out, target: (F.cross_entropy(out, target), 0.0)),
    "a loss for each sample": case_of(loss=nn.CrossEntropyLoss(reduction="none")),
    "none": case_of(loss=lambda out, target: None),
    "all is frozen": case_of(all_frozen),
    "a head that detaches": case_of(lambda: nn.Sequential(six_units(), *(nn.Identity() for _ in range(3)), Detached())),
}


class Detached(nn.Module):
    def forward(self, h):
        return h.detach()


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("name", NOTHING)
def test_a_loss_that_trains_nothing_is_refused(name, K):
    case = NOTHING[name]
    model = case.model()
    refused(
        lambda: fit(trainer_of(case, K, 1, model=model), case, 1), model, "loss|train|gradient|frozen|scalar|number"
    )


# --- Losses that average over something else than samples (W14) -------------------------------------------------

IGNORED, CLASS_WEIGHTS = 0, torch.tensor([0.2, 2.0, 1.0, 0.5, 1.5], dtype=torch.float64)


def not_ignored(target):
    return int((target != IGNORED).sum())


def weight_of(target):
    return float(CLASS_WEIGHTS[target].sum())


def both(target):
    return float(CLASS_WEIGHTS[target[target != IGNORED]].sum())


def of_time(loss):
    return lambda out, target: loss(out.flatten(0, 1), target.flatten())


class OfTime(nn.CrossEntropyLoss):
    def forward(self, out, target):
        return super().forward(out.flatten(0, 1), target.flatten())


class Told(OfTime):
    """Says what it averages over."""

    def num_terms(self, target):
        return not_ignored(target)


def log_softmax():
    return nn.Sequential(*six_units(), nn.LogSoftmax(dim=1))


def tagger():
    return nn.Sequential(
        nn.Embedding(11, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


class SecondClass(nn.Module):
    """[B, T, C] to [B, C, T], as torch's loss wants it."""

    def forward(self, h):
        return h.transpose(1, 2)


def tagger_of_torch():
    return nn.Sequential(*tagger(), SecondClass())


LOSSES = {
    "ignore_index": (case_of(loss=nn.CrossEntropyLoss(ignore_index=IGNORED)), not_ignored),
    "class_weights": (case_of(loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)), weight_of),
    "weights_and_ignore": (case_of(loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=IGNORED)), both),
    "smoothing_and_ignore": (case_of(loss=nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=0.1)), not_ignored),
    "nll": (case_of(log_softmax, loss=nn.NLLLoss(weight=CLASS_WEIGHTS)), weight_of),
    "tokens": (case_of(tagger_of_torch, data="tagged", loss=nn.CrossEntropyLoss(ignore_index=IGNORED)), not_ignored),
    "told": (case_of(tagger, data="tagged", loss=Told(ignore_index=IGNORED)), not_ignored),
    "plain": (case_of(loss=nn.CrossEntropyLoss()), len),
    "smoothed": (case_of(loss=nn.CrossEntropyLoss(label_smoothing=0.2)), len),
}
# What a function averages over cannot be seen: it may be refused, or told by the user, but not be wrong.
HIDDEN = {
    "a_subclass": (case_of(tagger, data="tagged", loss=OfTime(ignore_index=IGNORED)), not_ignored),
    "a_partial": (case_of(loss=functools.partial(F.cross_entropy, ignore_index=IGNORED)), not_ignored),
    "a_function": (case_of(loss=lambda out, target: F.cross_entropy(out, target, weight=CLASS_WEIGHTS)), weight_of),
    "tokens_of_a_function": (
        case_of(tagger, data="tagged", loss=of_time(nn.CrossEntropyLoss(ignore_index=IGNORED))), not_ignored
    ),
}  # fmt: skip


def trained_with_loss(case, K, M):
    """As harness.train, but with the loss itself, whose class says what it averages over."""
    trainer = adl_dist.Trainer(
        case.model(), loss_fn=case.loss, optimizer=sgd, method=adl_dist.method("adl", accumulation_steps=M),
        num_stages=K, **values(threads=1, dtype=torch.float64, timeout_seconds=30),
    )  # fmt: skip
    summary = fit(trainer, case, M)
    return trainer.full_state_dict(), summary["validation_loss"], owner_of(trainer)


@pytest.mark.parametrize(
    ("name", "K", "M"),
    grid(
        [*LOSSES, *HIDDEN], (1, 2), (1, 4), default=[("ignore_index", 2, 4), ("class_weights", 1, 4), ("tokens", 2, 4)]
    ),
)
def test_a_group_averages_over_what_the_loss_does(name, K, M):
    case, count = {**LOSSES, **HIDDEN}[name]
    try:
        found, validation, owner = trained_with_loss(case, K, M)
    except adl_dist.AdlError as error:
        if name in HIDDEN and "loss" in str(error):
            return
        raise
    right = expected(variant(case, count=count), K, M, owner, lr_schedule=None)
    assert unlike(found, right.state) == []
    if name in HIDDEN and M == 1:  # an update of one micro-batch needs no weights
        return
    assert abs(validation - right.validation) <= TOLERANCE * right.validation


# --- Losses that write ------------------------------------------------------------------------


def tempered(out, target):
    """Divides the output in place."""
    return F.cross_entropy(out.div_(1.5), target)


def rotated(out, target):
    """Writes into the target, which another call would write once more."""
    return F.cross_entropy(out, target.add_(1).remainder_(NUM_CLASSES))


def unmarked(out, target):
    """Marks targets for itself, in place, and only then uses them."""
    target[target > 3] = 0
    return F.cross_entropy(out, target)


def centred(out, target):
    """Writes to the output in several ways; the engine has to keep what it counts hits in."""
    out -= out.mean(1, keepdim=True)
    out[:, 0].mul_(0.5)
    return F.cross_entropy(out, target)


WRITING = {"output": tempered, "part_of_output": centred, "target": rotated, "part_of_target": unmarked}


@pytest.mark.parametrize("recompute", [None, "always"])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("name", WRITING)
def test_a_loss_may_write_to_what_it_is_given(name, K, recompute):
    case, method = case_of(loss=WRITING[name]), "gpipe" if recompute else "adl"
    trainer = trainer_of(case, K, 2, method=method, recompute=recompute)
    fit(trainer, case, 2, validates=False)
    uncut = oracle_of(case, K, 2, owner_of(trainer), method=method)
    for _ in range(EPOCHS):
        uncut.epoch([(x, target.clone()) for x, target in batches("vectors", NUM_SAMPLES, 1)])
    assert unlike(trainer.full_state_dict(), uncut.model.state_dict()) == []


def hits(loss, K, method, data):
    """The accuracy that is recorded of an update without a learning rate, and the target that the data have then."""
    still = functools.partial(torch.optim.SGD, lr=0.0)
    trainer = trainer_of(case_of(loss=loss, optimizer=still), K, 1, method=method)
    trainer.fit(data, epochs=1, batch_size=NUM_SAMPLES, val_dataset=data, shuffle=False, monitoring=SILENT)
    return trainer.evaluate(data, batch_size=NUM_SAMPLES)["validation_accuracy"]


@pytest.mark.parametrize("loss", [rotated, unmarked, tempered, centred, lambda o, t: F.cross_entropy(o.zero_(), t)])
@pytest.mark.parametrize("K", [1, 2])
def test_what_a_loss_writes_changes_neither_data_nor_hits(loss, K):
    inputs, targets = (tensor.clone() for tensor in dataset("vectors", NUM_SAMPLES, 1).tensors)
    data, before = TensorDataset(inputs, targets), targets.clone()
    found = hits(loss, K, "adl", data)
    assert torch.equal(targets, before)
    assert found == hits(F.cross_entropy, K, "adl", data)


def locally(loss):
    """Train with a loss on each of three stages."""
    case = case_of(loss=loss)
    trainer = adl_dist.Trainer(
        case.model(), loss_fn=loss, optimizer=sgd, method=adl_dist.method("dgl", accumulation_steps=1, head="linear"),
        num_stages=3, **values(threads=1, dtype=torch.float64, timeout_seconds=30),
    )  # fmt: skip
    fit(trainer, case, 1, validates=False)
    return trainer.full_state_dict()


IN_PLACE = {
    rotated: lambda out, target: F.cross_entropy(out, (target + 1) % NUM_CLASSES),
    tempered: lambda out, target: F.cross_entropy(out / 1.5, target),
}


@pytest.mark.parametrize("loss", IN_PLACE)
def test_each_local_loss_has_a_target_of_its_own(loss):
    """In one process all stages are handed the same one."""
    assert unlike(locally(loss), locally(IN_PLACE[loss])) == []


# --- Terms that are rare ----------------------------------------------------------------------------------------


def masked_mean(out, target):
    """[B, T, C] and [B, T]; says nothing of what it averages over."""
    mask = (target != IGNORED).to(out.dtype)
    return (F.cross_entropy(out.transpose(1, 2), target, reduction="none") * mask).sum() / mask.sum()


def weighted_mean(out, target):
    weights = torch.where(target == IGNORED, 0.5, 1.0).to(out.dtype)
    return (F.cross_entropy(out.transpose(1, 2), target, reduction="none") * weights).sum() / weights.sum()


def sentences(first_padded, num_samples=700):
    """Tokens, padded for the first time in the sample ``first_padded``, from then on in every third."""
    words = dataset("tagged", num_samples, 1).tensors[0]
    targets = words % (NUM_CLASSES - 1) + 1
    targets[first_padded::3, 2:] = IGNORED
    return TensorDataset(words, targets)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("loss", [masked_mean, weighted_mean])
@pytest.mark.parametrize(("first_padded", "when"), [(20, "seen in the targets"), (320, "no sample at the start")])
def test_padding_that_the_first_samples_lack_is_found(loss, first_padded, when, K):
    trainer = trainer_of(case_of(tagger, loss=loss), K, 4)
    with pytest.raises(ConfigError, match=f"no mean over the samples: .*{when}.*num_terms"):
        trainer.fit(sentences(first_padded), epochs=1, batch_size=8, shuffle=False, monitoring=SILENT)


def test_a_mean_over_all_tokens_passes_though_some_are_rare():
    case = case_of(tagger, loss=lambda out, target: F.cross_entropy(out.transpose(1, 2), target))
    trainer = trainer_of(case, 2, 4)
    trainer.fit(sentences(20), epochs=1, batch_size=8, shuffle=False, monitoring=SILENT)
