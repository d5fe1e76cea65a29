"""The module that the user has handed over holds the trained weights afterwards, whatever ended the training."""

import pytest
import torch
from torch import nn

from adl_dist.errors import DivergedError
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

K, M, SIZE = 3, 2, 2


class Positioned(nn.Module):
    """Reads parameters of its own in its forward: a scale, an embedding of positions, a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1))
        self.positions = nn.Parameter(torch.zeros(2, 6, 6))
        self.offsets = nn.ParameterList(torch.zeros(6) for _ in range(2))
        self.flat, self.first, self.second, self.last = nn.Flatten(), nn.Linear(72, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(self.flat(x + self.positions)) * self.scale
        x = self.second((x + self.offsets[0]).tanh()).tanh() + self.offsets[1]
        return self.last(x)


def trainer_of(model, method):
    return toy_trainer(K, M, method, model=model, balance="even", granularity="layer")


def fit(trainer, data, **options):
    return trainer.fit(data, batch_size=SIZE * M, monitoring=SILENT, shuffle=False, **options)


def assert_whole(model, trainer):
    """The user's module has the same weights as the trainer, under the same objects, and computes with them."""
    trained = trainer.full_state_dict()
    assert_same(model.state_dict(), trained)
    fresh = Positioned()
    fresh.load_state_dict(trained)
    x = FixedImages(4).images
    assert torch.equal(model.eval()(x), fresh.eval()(x))


@pytest.mark.parametrize("method", ["adl", "2bw"])
def test_after_fit_the_users_module_is_the_trained_one(method):
    model = Positioned()
    objects, before = dict(model.named_parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(model, method)
    fit(trainer, FixedImages(32), epochs=2, max_updates=11, val_dataset=FixedImages(8, seed=1))
    assert all(objects[name] is p and not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert_whole(model, trainer)
    trainer.evaluate(FixedImages(8), batch_size=4)
    assert_whole(model, trainer)


@pytest.mark.parametrize("method", ["adl", "2bw"])
def test_after_an_error_the_users_module_is_whole(method):
    model, data = Positioned(), FixedImages(32)
    data.images[20] = float("nan")
    trainer = trainer_of(model, method)
    with pytest.raises(DivergedError):
        fit(trainer, data, epochs=1)
    assert_whole(model, trainer)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Flatten(), nn.Linear(72, 6)), nn.Linear(6, 5)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x).tanh(), 0.5, self.training))


@pytest.mark.parametrize("K", [1, 2])
def test_modules_are_in_the_modes_in_which_they_were(K):
    model = WithDropout()
    model.first.eval()
    trainer = toy_trainer(K, 1, "bp", model=model, balance="even")
    before = {name: module.training for name, module in model.named_modules()}
    trainer.fit(FixedImages(4), epochs=1, batch_size=4, val_dataset=FixedImages(4), monitoring=SILENT)
    assert {name: module.training for name, module in model.named_modules()} == before
    trainer.evaluate(FixedImages(4), batch_size=4)
    assert {name: module.training for name, module in model.named_modules()} == before
