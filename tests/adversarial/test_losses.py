"""Losses of users: those that train nothing, average over something else than samples, or reach around the cut."""

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
    frozen_copy,
    oracle_of,
    owner_of,
    refusal,
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


# --- Losses with a state, or that write ------------------------------------------------------------------------


def counting_loss():
    calls = 0

    def loss(out, target):
        nonlocal calls
        calls += torch.is_grad_enabled()
        return F.cross_entropy(out, target) * (1.0 + 0.05 * calls)

    return loss


def tempered(out, target):
    """Divides the output in place."""
    return F.cross_entropy(out.div_(1.5), target)


def rotated(out, target):
    """Writes into the target, which another call would write once more."""
    return F.cross_entropy(out, target.add_(1).remainder_(NUM_CLASSES))


class Warming:
    """Grows with its calls, which it counts in a list, a number and a tensor."""

    def __init__(self):
        self.calls, self.count, self.share = [0], 0, torch.zeros((), dtype=torch.float64)

    def __call__(self, out, target):
        self.calls[0] += torch.is_grad_enabled()
        self.count += torch.is_grad_enabled()
        self.share += 0.01 * torch.is_grad_enabled()
        return F.cross_entropy(out, target) * (1.0 + 0.05 * self.calls[0] + 0.01 * self.count + self.share.item())


class CountsInTheClass:
    calls = 0

    def __call__(self, out, target):
        type(self).calls += torch.is_grad_enabled()
        return F.cross_entropy(out, target) * (1.0 + 0.05 * self.calls)


def counting_in_the_class():
    CountsInTheClass.calls = 0
    return CountsInTheClass()


CALLS = 0


def counted_globally(out, target):
    global CALLS
    CALLS += torch.is_grad_enabled()
    return F.cross_entropy(out, target) * (1.0 + 0.05 * CALLS)


def counting_globally():
    global CALLS
    CALLS = 0
    return counted_globally


def of_a_sum(counter, out, target):
    counter["calls"] += torch.is_grad_enabled()
    return F.cross_entropy(out, target) * (1.0 + 0.05 * counter["calls"])


def unmarked(out, target):
    """Marks targets for itself, in place, and only then uses them."""
    target[target > 3] = 0
    return F.cross_entropy(out, target)


def centred(out, target):
    """Writes to the output in several ways; the engine has to keep what it counts hits in."""
    out -= out.mean(1, keepdim=True)
    out[:, 0].mul_(0.5)
    return F.cross_entropy(out, target)


STRANGE = {
    "counts": counting_loss, "an_object": Warming, "in_the_class": counting_in_the_class,
    "globally": counting_globally, "a_partial": lambda: functools.partial(of_a_sum, {"calls": 0}),
    "writes_output": lambda: tempered, "writes_output_in_part": lambda: centred,
    "writes_target": lambda: rotated, "writes_target_in_part": lambda: unmarked,
}  # fmt: skip


@pytest.mark.parametrize("recompute", [None, "always"])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("name", STRANGE)
def test_a_loss_with_a_state_is_called_once_or_refused(name, K, recompute):
    case = case_of(loss=STRANGE[name]())
    method = "gpipe" if recompute else "adl"
    try:
        trainer = trainer_of(case, K, 2, method=method, recompute=recompute)
        fit(trainer, case, 2, validates=False)
    except adl_dist.AdlError as error:
        if (recompute or K > 1) and error.exit_code == 2 and "the loss" in str(error):
            return
        raise
    uncut = oracle_of(case_of(loss=STRANGE[name]()), K, 2, owner_of(trainer), method=method)
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


def test_local_losses_with_a_state_are_refused():
    with pytest.raises(
        ConfigError, match=r"the loss keeps something of its own, .* \(loss_fn.*\), but method=dgl has a local loss"
    ):
        locally(counting_loss())


# --- Losses that reach around the cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3])
def trained_around(build, loss_of, K):
    """Train with the loss that ``loss_of`` makes for a model; return the weights, or None if that is refused."""
    model = case_of(build).model()
    before = frozen_copy(model)
    case = case_of(build, loss=loss_of(model))
    trainer = trainer_of(case, K, 1, model=model)
    try:
        fit(trainer, case, 1, validates=False)
    except adl_dist.AdlError as error:
        if K > 1 and refusal(case_of(word="."), error, before, model).letter == "R":
            return None
        raise
    return trainer.full_state_dict(), owner_of(trainer)


def right_around(build, loss_of, K, owner):
    model = case_of(build).model()
    uncut = oracle_of(case_of(build, loss=loss_of(model)), K, 1, owner, model=model)
    for _ in range(EPOCHS):
        uncut.epoch(batches("vectors", NUM_SAMPLES, 1))
    return model.state_dict()


class Balanced(nn.Module):
    """An expert layer that leaves its balance loss in an attribute, for the loss function to add."""

    def __init__(self):
        super().__init__()
        self.inner, self.extra = nn.Linear(WIDTH, WIDTH), None

    def forward(self, h):
        y = self.inner(h)
        self.extra = y.pow(2).mean()
        return torch.tanh(y)


def balanced():
    return nn.Sequential(
        nn.Linear(6, WIDTH), Balanced(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
    )


def penalty(model):
    """On all weights; the last stage is not where those of the others are."""
    return lambda out, target: F.cross_entropy(out, target) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())


def left_behind(model):
    return lambda out, target: F.cross_entropy(out, target) + model[1].extra


AROUND = {"a penalty on weights": (six_units, penalty), "a loss left in a module": (balanced, left_behind)}


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("name", AROUND)
def test_a_loss_that_reaches_around_is_right_or_refused(name, K):
    found = trained_around(*AROUND[name], K)
    assert found is None or unlike(found[0], right_around(*AROUND[name], K, found[1])) == []
