"""Changes of model and loss by the user: between two calls of fit, by a callback, by a forward."""

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError
from tests.support.runs import sgd, toy_trainer
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


@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize("change", [warmer, smoother])
def test_a_number_may_change_after_an_epoch(change, by_callback):
    found = trained(change, by_callback=by_callback)
    assert not torch.equal(found, trained(lambda model, loss: None, by_callback=by_callback))


class Narrowed(nn.Module):
    """Hands on some columns; the forward around looks how many."""

    def __init__(self):
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(72, 6), nn.Sequential(nn.Linear(6, 6), Columns()), nn.Linear(1, 5)

    def forward(self, x):
        h = self.cut(self.first(x.flatten(1)))
        assert h.shape[1] == self.cut[1].width
        return self.last(h.sum(1, keepdim=True))


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 6

    def forward(self, h):
        return h[:, : self.width]


def test_a_shape_may_change_after_an_epoch():
    def weights(K):
        torch.manual_seed(0)
        model, callback = Narrowed(), adl_dist.Callback()
        callback.on_epoch = lambda now: setattr(model.cut[1], "width", 3)
        trainer = toy_trainer(K, model=model, method="bp", balance=["last"] if K > 1 else "even", dtype=torch.float64)
        data = FixedImages(12, dtype=torch.float64)
        trainer.fit(data, epochs=2, batch_size=4, callbacks=[callback], monitoring=SILENT)
        return trainer.full_state_dict()["cut.0.weight"]

    torch.testing.assert_close(weights(2), weights(1), rtol=0, atol=1e-12)


def test_a_callback_may_not_freeze():
    with pytest.raises(ConfigError, match=r"stage 1: requires_grad of '3.weight' was changed during the run"):
        trained(freezes, by_callback=True)


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
    with pytest.raises(ConfigError, match=r"stage 1: requires_grad of '3.weight' was changed during the run"):
        toy_trainer(2, model=model, balance=[3, 2], optimizer=sgd).fit(DATA, epochs=2, batch_size=4, monitoring=SILENT)
