"""Losses of a GPU are looked at one update late, but all of them, by the number of their update."""

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import DivergedError
from adl_dist.stage.losses import Losses
from adl_dist.stage.tally import Tally
from tests.support.toys import FixedImages, batch_norm_net


@pytest.fixture
def underway(monkeypatch):
    """As on a GPU: figures are on their way when they are first asked for."""
    monkeypatch.setattr(Tally, "fetch", lambda self: True)


def tally_of(loss):
    tally = Tally()
    tally.score(None, torch.zeros(1), torch.tensor(loss))
    return tally


def test_on_the_cpu_a_loss_that_is_not_finite_is_told_at_once():
    with pytest.raises(DivergedError, match=r"stage 3: the loss is nan at update 0 \(epoch 0\)"):
        Losses(3).add(tally_of(float("nan")), update=0, epoch=0)


@pytest.mark.usefixtures("underway")
def test_one_that_is_underway_is_told_with_the_next_or_at_the_end():
    losses = Losses(3)
    losses.add(tally_of(1.0), update=0, epoch=0)
    losses.add(tally_of(float("inf")), update=1, epoch=0)
    with pytest.raises(DivergedError, match="the loss is inf at update 1 "):
        losses.add(tally_of(float("nan")), update=2, epoch=0)
    losses.forget()  # the segment was interrupted there
    losses.add(tally_of(float("nan")), update=5, epoch=2)
    with pytest.raises(DivergedError, match=r"the loss is nan at update 5 \(epoch 2\)"):
        losses.check()


def test_a_stage_without_a_loss_has_none_to_look_at():
    losses = Losses(0)
    losses.add(Tally(), update=0, epoch=0)
    losses.check()


@pytest.mark.usefixtures("underway")
def test_no_segment_ends_before_its_last_loss_was_looked_at():
    trainer = adl_dist.Trainer(
        batch_norm_net(),
        loss_fn=lambda out, target: nn.functional.cross_entropy(out, target) * float("inf"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        num_stages=2,
    )
    with pytest.raises(DivergedError, match="stage 1: the loss is inf at update 0 "):
        trainer.fit(FixedImages(8), epochs=1, batch_size=8, quiet=True)
