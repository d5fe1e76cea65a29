"""Changes of model and loss by the user: between two calls of fit, by a callback, by a forward."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

DATA = FixedImages(12)


class Scaled(nn.Module):
    """Divides by a number that it holds."""

    def __init__(self):
        super().__init__()
        self.tau = 1.0

    def forward(self, h):
        return torch.tanh(h / self.tau)


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = 0.0

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target, label_smoothing=self.alpha)


def warmer(model, loss):
    model[2].tau = 2.0


def smoother(model, loss):
    loss.alpha = 0.1


def freezes(model, loss):
    model[3].weight.requires_grad_(False)


def trained(change, *, by_callback):
    """Train two epochs; make a change after the first one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), Scaled(), nn.Linear(6, 6), Scaled(), nn.Linear(6, 5))
    loss, callback = Smoothed(), adl_dist.Callback()
    callback.on_epoch = lambda now: change(model, loss) if by_callback and now.epoch == 1 else None
    trainer = toy_trainer(2, model=model, balance="even", loss_fn=loss)
    for epochs in (2,) if by_callback else (1, 1):
        trainer.fit(DATA, epochs=epochs, batch_size=4, callbacks=[callback], monitoring=SILENT)
        if not by_callback:
            change(model, loss)
    return trainer.full_state_dict()["1.weight"]


@pytest.mark.parametrize(("change", "by_callback"), [(warmer, True), (warmer, False), (smoother, True)])
def test_a_number_may_change_after_an_epoch(change, by_callback):
    found = trained(change, by_callback=by_callback)
    assert not torch.equal(found, trained(lambda model, loss: None, by_callback=by_callback))


def test_a_callback_may_not_freeze():
    with pytest.raises(ConfigError, match=r"stage 1: requires_grad of '3.weight' was changed during the run"):
        trained(freezes, by_callback=True)


# --- What several stages use, against one stage, which has no copies ------------------------------------------------


class Shared(nn.Module):
    """A weight, three buffers, a tensor and numbers in three objects, all used on several stages."""

    def __init__(self):
        super().__init__()
        self.into, self.layer, self.again, self.head = (nn.Linear(n, m) for n, m in [(72, 6), (6, 6), (6, 6), (6, 5)])
        self.again.weight = self.layer.weight
        self.register_buffer("gain", torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("recent", torch.zeros(()), persistent=False)
        self.shift, self.options, self.taus = torch.zeros(()), {"scale": 1.0}, [1.0]
        self.register_buffer("again_gain", self.gain)
        self.steps = 0
        self.late, self.config = 0.0, SimpleNamespace(rate=1.0, ignored={"a"}, activation=torch.tanh, table=np.zeros(2))

    def get_extra_state(self):
        return self.steps

    def set_extra_state(self, state):
        self.steps = state

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.calls += 0.01
            self.recent = 0.9 * self.recent + 0.01
        h, config = x.flatten(1), self.config
        for layer in (self.into, self.layer, self.again):
            h = layer(h) * self.gain * self.again_gain * self.options["scale"] * config.rate / self.taus[0]
            h = config.activation(h + self.shift + self.calls + self.recent + self.late + float(config.table[0]))
        return self.head(h)


@torch.no_grad()
def halves(model):
    model.layer.weight.mul_(0.5)


def loads(model):
    state = model.state_dict()
    model.load_state_dict({name: 0.7 * value if torch.is_tensor(value) else 7 for name, value in state.items()})


def fills(model):
    model.gain.fill_(0.5)
    model.calls.zero_()
    model.shift.fill_(0.1)


def assigns(model):
    model.gain, model.shift, model.late = torch.full((6,), 0.5), torch.tensor(0.1), torch.tensor(0.2)


def keeps(model):
    """Assign a tensor once, and write to it later."""
    if float(model.gain[0]) != 0.5:
        model.gain = model.again_gain = model.mine = torch.ones(6)
    model.mine.fill_(0.5)
    model.recent.zero_()


def counts(model):
    model.options["scale"], model.taus[0], model.config.rate, model.config.table[0] = 0.5, 2.0, 0.5, 0.1


def of_shared(K, change, folder=None):
    """Train two epochs and one more; make ``change`` after the first, by a callback, and after the second."""
    torch.manual_seed(0)
    model, callback = Shared(), adl_dist.Callback()
    callback.on_epoch = lambda now: change(model) if now.epoch == 1 and folder is None else None
    trainer = toy_trainer(K, 2, "1f1b", model=model, balance="even")
    trainer.fit(DATA, epochs=2, batch_size=4, callbacks=[callback], monitoring=SILENT, run_dir=folder)
    change(model)
    loss = trainer.evaluate(DATA)["validation_loss"]
    trainer.fit(DATA, epochs=3 if folder else 1, batch_size=4, monitoring=SILENT, run_dir=folder)
    if folder:
        trainer.load_checkpoint(folder)
    change(model)
    return {**trainer.full_state_dict(), "loss": loss, "after": trainer.evaluate(DATA)["validation_loss"]}


@pytest.mark.parametrize("change", [halves, loads, fills, assigns, keeps, counts])
@pytest.mark.parametrize("K", [2, 3])
def test_what_the_user_writes_reaches_every_stage(K, change):
    torch.testing.assert_close(of_shared(K, change), of_shared(1, change))


@pytest.mark.parametrize("change", [halves, fills, assigns, counts])
def test_what_a_callback_writes_last_is_kept_and_saved(change, tmp_path):
    def of_callback(K):
        torch.manual_seed(0)
        model, callback, folder = Shared(), adl_dist.Callback(), tmp_path / str(K)
        callback.on_epoch = lambda now: change(model)
        trainer = toy_trainer(K, 2, "1f1b", model=model, balance="even")
        trainer.fit(DATA, epochs=2, batch_size=4, callbacks=[callback], monitoring=SILENT, run_dir=folder)
        found = {"memory": trainer.full_state_dict(), "loss": trainer.evaluate(DATA)["validation_loss"]}
        trainer.load_checkpoint(folder)
        return {**found, "checkpoint": trainer.full_state_dict(), "model": dict(model.state_dict())}

    torch.testing.assert_close(of_callback(2), of_callback(1))


def test_a_tied_weight_may_not_be_frozen_later():
    model = Shared()
    trainer = toy_trainer(2, 2, "1f1b", model=model, balance="even")
    trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
    model.layer.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'layer.weight', which several stages use, .* and is frozen now"):
        trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}])
def test_a_replay_moves_no_buffer_of_the_model_again(options):
    def of_replays(K):
        torch.manual_seed(0)
        trainer = toy_trainer(K, 2, "gpipe", options, model=Shared(), balance="even")
        trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
        return {name: value for name, value in trainer.full_state_dict().items() if torch.is_tensor(value)}

    torch.testing.assert_close(of_replays(2), of_replays(1))


@pytest.mark.ranks
def test_what_each_rank_writes_reaches_its_stage(tmp_path):
    uncut = of_shared(1, fills, tmp_path / "uncut")
    for found in run_ranks(2, of_shared, 2, fills, tmp_path / "ranks"):
        torch.testing.assert_close(found, uncut)


def other_head(model):
    model.head = nn.Linear(6, 5)


def other_weights(model):
    model.load_state_dict({name: copy.copy(value) for name, value in model.state_dict().items()}, assign=True)


def prunes(model):
    prune.l1_unstructured(model.into, "weight", amount=0.5)


def other_shape(model):
    model.gain = torch.ones(1)


def other_forward(model):
    model.layer.forward = model.again.forward


@pytest.mark.parametrize("change", [other_head, other_weights, prunes, other_shape, other_forward])
def test_a_part_that_was_replaced_is_refused(change):
    with pytest.raises(PartitionError, match="other modules, parameters or shapes than when it was cut"):
        of_shared(2, change)


def test_a_part_that_was_replaced_leaves_the_trained_weights():
    """They are needed for the new Trainer."""
    model = Shared()
    trainer = toy_trainer(2, 2, "1f1b", model=model, balance="even")
    trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
    trained = dict(model.state_dict())
    other_head(model)
    torch.testing.assert_close(trainer.full_state_dict(), trained)


# --- What a model keeps, and objects in its attributes --------------------------------------------------------------


class Near:
    def apply(self, h):
        return h


class Far(Near):
    """Like the other it has no attributes."""

    def apply(self, h):
        return 2 * h


class Keeps(nn.Module):
    """Keeps its activation, a table for the last size and means; counts in a dictionary that two modules share."""

    def __init__(self, shared):
        super().__init__()
        self.linear, self.how, self.shared, self.size = nn.Linear(6, 6), Near(), shared, 0
        self.calls = 0
        self.register_buffer("means", torch.zeros(0))
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, h):
        self.calls += self.training
        if len(h) != self.size:
            self.size, self.table = len(h), torch.arange(len(h))[:, None] / 10
        h = h + self.table + self.calls / 100
        self.activation = h.detach()
        self.means = torch.cat([self.means, self.activation.mean()[None]])[-4:]
        self.shared["calls"] += 1
        return torch.tanh(self.how.apply(self.linear(h)) * self.shared["scale"] + self.shared["calls"] % 3)


def by_hand(model):
    model(torch.ones(3, 72))


def forgets(model):
    model.load_state_dict({**model.state_dict(), "2._extra_state": {"calls": 0}}, strict=False)


def farther(model):
    model[2].how = Far()


def scaled(model):
    model[2].shared |= {"calls": 0, "scale": 0.5}


def of_keeping(K, change):
    torch.manual_seed(0)
    shared = {"scale": 1.0, "calls": 0}
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), Keeps(shared), Keeps(shared), nn.Linear(6, 5))
    trainer = toy_trainer(K, 2, "1f1b", model=model, balance="even" if K == 1 else [4, 1])
    for _ in range(2):
        trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
        change(model)
        shared["calls"] = 0  # this is what the copies count on from; that of one stage has counted here
        trainer.evaluate(DATA)
        shared["calls"] = 0
    return trainer.full_state_dict()["1.weight"]


@pytest.mark.parametrize("change", [lambda model: None, by_hand, forgets, farther, scaled])
def test_what_a_model_keeps_stands_in_no_changes_way(change):
    torch.testing.assert_close(of_keeping(2, change), of_keeping(1, change))


class Noisy(nn.Module):
    """Draws from a generator of its own, and asks an object that can be called."""

    def __init__(self):
        super().__init__()
        self.generator, self.scale, self.bias = torch.Generator().manual_seed(0), Scale(), 0.1

    def forward(self, h):
        h = self.scale(h) + torch.rand(6, generator=self.generator)
        return h + self.bias if hasattr(self, "bias") else h + 0


class Scale:
    by = 1.0

    def __call__(self, h):
        return self.by * h


def deletes(noisy):
    if hasattr(noisy, "bias"):
        del noisy.bias


@pytest.mark.parametrize("change", [lambda noisy: None, lambda noisy: setattr(noisy.scale, "by", 2.0), deletes])
def test_objects_change_and_generators_go_on(change):
    def of_noisy(K):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), Noisy(), nn.Linear(6, 6), nn.Linear(6, 5))
        trainer = toy_trainer(K, 2, "1f1b", model=model, balance="even" if K == 1 else [4, 1])
        for _ in range(2):
            trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
            change(model[2])
        return trainer.full_state_dict()

    torch.testing.assert_close(of_noisy(2), of_noisy(1))


def test_an_object_without_a_copy_is_refused_by_name():
    model = Shared()
    trainer = toy_trainer(2, 2, "1f1b", model=model, balance="even")
    trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
    model.lock = threading.Lock()
    with pytest.raises(PartitionError, match="'lock' of Shared cannot be copied"):
        trainer.fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
