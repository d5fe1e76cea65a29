"""Changes of model and loss that not all stages would see: by a callback, between two calls of fit, by a forward."""

import functools
from argparse import Namespace
from types import MethodType

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import AdlError, CallbackError, ConfigError
from adl_dist.training.unchanged import Unchanged
from tests.support.ranks import run_ranks
from tests.support.runs import sgd, toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

DATA = FixedImages(12)


class Scaled(nn.Module):
    """Divides by a number that it holds; ``options`` hold more."""

    def __init__(self, at=0.0):
        super().__init__()
        self.tau, self.options = 1.0, {"shift": [at]}
        self.plain = torch.ones(2)

    def forward(self, h):
        return torch.tanh(h / self.tau + self.options["shift"][0])


class Root(nn.Module):
    """Traced; divides by a number of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(72, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.tau = 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)) / self.tau))))


SHARED = {"scale": 1.0}


class Annealed(nn.Module):
    """Traced; computes with values that a schedule of the user's own might change."""

    shift = 0.0

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(72, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.plain, self.options = torch.tensor(1.0), Namespace(scale=1.0)
        self.register_buffer("warmth", torch.tensor(1.0))

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)) / self.warmth * self.plain)))
        return self.last(h * self.options.scale * SHARED["scale"] + self.shift)


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = 0.0

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target, label_smoothing=self.alpha)


def chain():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), Scaled(), nn.Linear(6, 6), Scaled(), nn.Linear(6, 5))


class Changes(adl_dist.Callback):
    def __init__(self, change):
        self.on_epoch = lambda now: change() if now.epoch == 1 else None


def fit(trainer, **options):
    trainer.fit(DATA, epochs=2, batch_size=4, val_dataset=DATA, monitoring=SILENT, **options)


def of_loss(model, loss):
    loss.alpha = 0.1


def of_layer(model, loss):
    model[2].tau = 2.0


def in_container(model, loss):
    model[4].options["shift"][0] = 1.0


def of_root(model, loss):
    model.tau = 2.0


def freezes(model, loss):
    model[3].weight.requires_grad_(False)


def writes(model, loss):
    with torch.no_grad():
        model[5].weight.mul_(0.5)


def hooks(model, loss):
    model[3].register_forward_hook(lambda module, given, out: out * 2)


def replaces(model, loss):
    model[4] = nn.Tanh()


def evaluates(model, loss):
    model[4].train()  # after an evaluation


SEEN = {
    "number of the loss": (of_loss, "it has changed 'alpha' of the loss"),
    "number of a layer": (of_layer, "it has changed '2.tau' of the model"),
    "element of a container": (in_container, "it has changed '4.options' of the model"),
    "weight": (writes, "it has changed '5.weight' of the model"),
    "hook": (hooks, "it has changed '3._forward_hooks' of the model"),
}
UNSEEN = [
    (Root, of_root, "'tau' of the model, or what it is tied to, was changed since"),
    (chain, replaces, "'4' of the model, or what it is tied to, was changed since"),
    (chain, evaluates, "it has changed the mode of '4' of the model"),
]


def with_change(change, make=chain, K=2):
    """Train with a callback that makes a change when the first epoch has ended."""
    torch.manual_seed(0)
    model, loss = make(), Smoothed()
    trainer = toy_trainer(K, model=model, balance="even", loss_fn=loss)
    fit(trainer, callbacks=[Changes(lambda: change(model, loss))])
    return trainer.full_state_dict()


@pytest.mark.parametrize(("make", "change", "told"), UNSEEN)
def test_what_stages_do_not_read_again_no_callback_may_change(make, change, told):
    with pytest.raises(CallbackError, match=f"fails at update 3: {told}"):
        with_change(change, make)
    with_change(change, make, K=1)


def test_what_the_stages_of_one_process_read_again_it_may():
    for change, _ in SEEN.values():
        assert not torch.equal(with_change(change)["1.weight"], with_change(lambda model, loss: None)["1.weight"])
    with pytest.raises(ConfigError, match=r"stage 1: requires_grad of '3.weight' was changed during the run"):
        with_change(freezes)


def told_of(name):
    try:
        with_change(SEEN[name][0])
    except AdlError as error:
        return str(error)
    return "trained"


@pytest.mark.ranks
@pytest.mark.parametrize("name", SEEN)
def test_of_several_processes_it_may_change_nothing(name):
    for said in run_ranks(2, told_of, name):
        assert f"fails at update 3: {SEEN[name][1]}, which not all stages would see" in said


def test_losses_that_are_functions_are_looked_into():
    how = {"weight": 0.0}

    def loss_fn(output, target):
        return how["weight"] * output.square().mean()

    watched = Unchanged(chain(), [], functools.partial(loss_fn, target=None), in_processes=True)
    with pytest.raises(ConfigError, match=r"it has changed 'loss_fn\.how' of the loss"), watched.kept():
        how["weight"] = 1.0


class Cached(Root):
    """Has a cache that is made when it is read."""

    @functools.cached_property
    def size(self):
        return sum(p.numel() for p in self.parameters())


class KeepsEval(nn.Sequential):
    """Its fourth layer stays in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self[3].eval()
        return self


def adds(model, loss):
    model.note, model._seen = "of the callback's own", 1
    loss.history = [1]


@pytest.mark.parametrize("in_processes", [False, True])
@pytest.mark.parametrize(
    ("make", "look"),
    [
        (Cached, lambda model: model.size),
        (lambda: KeepsEval(*chain()), lambda model: (model.eval(), model.train())),
        (lambda: chain().eval(), lambda model: (model.train(), model.eval())),
        (chain, lambda model: adds(model, Smoothed())),
        (Root, lambda model: setattr(model, "unread", 1)),
    ],
)
def test_caches_modes_and_notes_are_no_changes(make, look, in_processes):
    model = make()
    model.unread = 0
    watched = Unchanged(model, [], Smoothed(), in_processes=in_processes and make is not Root)
    modes = [module.training for module in model.modules()]
    with watched.kept():
        look(model)
    assert modes == [module.training for module in model.modules()]


class Scale:
    """An object of the user's own, with a number and a note of how often that was asked for."""

    def __init__(self):
        self.by, self._asked = 2.0, 0


def test_what_an_object_notes_for_itself_is_no_change():
    model = chain()
    model[2].scale = Scale()
    watched = Unchanged(model, [], Smoothed(), in_processes=True)
    with watched.kept():
        model[2].scale._asked += 1
    with pytest.raises(ConfigError, match=r"it has changed '2\.scale' of the model"), watched.kept():
        model[2].scale.by = 1.0


def test_a_method_reaches_what_its_code_names():
    class Experiment:
        def __init__(self):
            self.weight, self.history = 1.0, []

        def loss(self, output, target):
            return self.weight * output.sum()

    experiment = Experiment()
    watched = Unchanged(chain(), [], experiment.loss, in_processes=True)
    with watched.kept():
        experiment.history.append(1)
    with pytest.raises(ConfigError, match="it has changed 'weight' of the loss"), watched.kept():
        experiment.weight = 2.0


def test_reading_is_no_change():
    model, seen = chain(), []

    def look():
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.zeros(1, 2, 6, 6)))
        model.train()

    fit(toy_trainer(2, model=model, balance="even"), callbacks=[Changes(look)])
    watched = Unchanged(model, [], nn.CrossEntropyLoss(), in_processes=True)
    with watched.kept():
        look()
    assert len(seen) == 2


BETWEEN = [
    (chain, replaces, "'4'"), (Root, of_root, "'tau'"),
    (chain, lambda model, loss: setattr(model[3], "weight", model[5].weight), "'5.weight'"),
    (Annealed, lambda model, loss: setattr(model, "warmth", torch.tensor(2.0)), "'warmth'"),
    (Annealed, lambda model, loss: setattr(model, "plain", torch.tensor(2.0)), "'plain'"),
    (Annealed, lambda model, loss: setattr(model.options, "scale", 2.0), "'options'"),
    (Annealed, lambda model, loss: SHARED.update(scale=2.0), "'SHARED'"),
    (Annealed, lambda model, loss: setattr(Annealed, "shift", 2.0), "'shift'"),
    (Annealed, lambda model, loss: setattr(model, "forward", MethodType(Root.forward, model)), "'forward'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "what"), BETWEEN)
def test_a_cut_model_is_not_rebuilt_between_two_calls(make, change, what, monkeypatch):
    monkeypatch.setitem(SHARED, "scale", 1.0)
    monkeypatch.setattr(Annealed, "shift", 0.0)
    model = make()
    trainer = toy_trainer(2, model=model, balance="even")
    fit(trainer)
    change(model, None)
    told = f"{what} of the model, or what it is tied to, was changed since the model was cut"
    with pytest.raises(ConfigError, match=told):
        fit(trainer)


def test_what_stages_read_each_time_may_change_between_two_calls():
    weights = []
    for change in (True, False):
        torch.manual_seed(0)
        model, loss = chain(), Smoothed()
        trainer = toy_trainer(2, model=model, balance="even", loss_fn=loss)
        fit(trainer)
        if change:
            of_layer(model, loss)
            of_loss(model, loss)
            freezes(model, loss)
        before = model[3].weight.clone()
        fit(trainer)
        assert torch.equal(before, model[3].weight) == change
        weights.append(model[1].weight)
    assert not torch.equal(*weights)


class Unfreezes(nn.Linear):
    """Begins to train when it has been called often."""

    def __init__(self):
        super().__init__(6, 6)
        self.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        if self.training:
            self.calls += 1
        if self.calls >= 3:
            self.requires_grad_(True)
        return super().forward(h)


def test_a_forward_may_not_unfreeze_during_a_run():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), Unfreezes(), nn.Linear(6, 5))
    told = r"stage 1: requires_grad of '3.weight' was changed during the run"
    with pytest.raises(ConfigError, match=told):
        fit(toy_trainer(2, model=model, balance=[3, 2], optimizer=sgd))


mean = 0.0  # a variable of this script, of the name of a method that the forward calls
ARGUMENTS = Namespace(scale=1.0, epoch=0)


class ReadsArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(72, 6), nn.Linear(6, 5)

    def forward(self, x):
        h = torch.tanh(self.first(x.flatten(1)))
        return self.last((h - h.mean(dim=1, keepdim=True)) * ARGUMENTS.scale)


def test_what_no_forward_reads_may_change(monkeypatch):
    model = ReadsArguments()  # which a script holds, too
    trainer = toy_trainer(2, model=model, balance="even")
    fit(trainer)
    monkeypatch.setitem(globals(), "mean", 1.0)
    monkeypatch.setattr(ARGUMENTS, "epoch", 1)
    fit(trainer)
    monkeypatch.setattr(ARGUMENTS, "scale", 2.0)
    with pytest.raises(ConfigError, match="'ARGUMENTS' of the model, or what it is tied to, was changed"):
        fit(trainer)
