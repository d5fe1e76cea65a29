"""Figures of a GPU are looked at one update late, but all of them, by the number of their update."""

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import adl_dist
from adl_dist.errors import DivergedError
from adl_dist.stage.nonfinite import GradientPolicy, NonFiniteCheck
from adl_dist.stage.stats import StepStats, _underway, norm_of
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def underway(monkeypatch):
    """As on a GPU: figures are on their way when they are first asked for."""
    monkeypatch.setattr(StepStats, "fetch", lambda self: True)


def tally_of(loss=1.0, norm=1.0):
    tally = StepStats(gradient_norm=torch.tensor(norm))
    tally.score(None, torch.zeros(1), torch.tensor(loss))
    return tally


def faults_of_stage_3():
    return NonFiniteCheck(GradientPolicy(), stage=3, is_last=True)


@pytest.mark.parametrize(
    ("figures", "what"),
    [({"loss": NAN}, "the loss is nan"), ({"norm": INF}, "the norm of the gradient is inf")],
    ids=["loss", "gradient"],
)
def test_on_the_cpu_what_is_not_finite_is_told_at_once(figures, what):
    with pytest.raises(DivergedError, match=rf"stage 3: {what} at update 0 \(epoch 0\)"):
        faults_of_stage_3().judge(tally_of(**figures), (), update=0, epoch=0)


@pytest.mark.usefixtures("underway")
def test_what_is_underway_is_told_with_the_next_or_at_the_end():
    faults = faults_of_stage_3()
    faults.judge(tally_of(), (), update=0, epoch=0)
    faults.judge(tally_of(norm=INF), (), update=1, epoch=0)
    with pytest.raises(DivergedError, match="the norm of the gradient is inf at update 1 "):
        faults.judge(tally_of(NAN), (), update=2, epoch=0)
    faults.forget()  # the segment was interrupted there
    faults.judge(tally_of(NAN), (), update=5, epoch=2)
    with pytest.raises(DivergedError, match=r"the loss is nan at update 5 \(epoch 2\)"):
        faults.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_torch(dtype):
    gradients = [torch.randn(shape, dtype=dtype) for shape in [(3, 4), (), (7,), (2, 0)]]
    assert torch.equal(norm_of(gradients), get_total_norm(gradients))


def test_a_group_adds_up_what_its_micro_batches_were_scored():
    tally = StepStats()
    tally.score(torch.eye(3), torch.tensor([0, 1, 1]), torch.tensor(0.5))
    tally.score(torch.eye(3)[:1], torch.tensor([0]), torch.tensor(2.0))
    assert tally.numbers() == {"num_samples": 4, "loss_sum": 0.5 * 3 + 2.0, "num_correct": 3}


def test_what_is_copied_off_a_gpu_keeps_its_order():
    assert [float(number) for number in _underway([torch.tensor(3.0), torch.tensor(1.0)])] == [3.0, 1.0]
    assert _underway([]) == []


def test_a_stage_without_loss_and_parameters_checks_nothing():
    faults = NonFiniteCheck(GradientPolicy(), stage=0, is_last=False)
    faults.judge(StepStats(), (), update=0, epoch=0)
    faults.check()


@pytest.mark.usefixtures("underway")
def test_no_segment_ends_before_its_last_loss_was_looked_at():
    trainer = adl_dist.Trainer(
        batch_norm_net(),
        loss_fn=lambda out, target: nn.functional.cross_entropy(out, target) * float("inf"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        num_stages=2,
    )
    with pytest.raises(DivergedError, match="stage 1: the loss is inf at update 0 "):
        trainer.fit(FixedImages(8), epochs=1, batch_size=8, monitoring=QUIET)
