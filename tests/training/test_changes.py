"""Changes of model and loss by the user: between two calls of fit, by a callback, by a forward."""

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError
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
