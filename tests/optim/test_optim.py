"""Learning rates are functions of the update index: against formulas, torch's own schedules, and resumption."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from adl_dist.errors import ConfigError
from adl_dist.optim import build_lr_schedule, constant, cosine, fast_forward, multistep, try_schedule
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT


def sgd(lr=0.1):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def learning_rates(schedule, num_updates):
    """The rate of each update, as a training loop meets it."""
    rates = []
    for _ in range(num_updates):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


MULTISTEP = partial(multistep, updates_per_epoch=1, milestones=[3, 5], gamma=0.5, warmup_epochs=2)
COSINE = partial(cosine, updates_per_epoch=1, total_updates=20, final_factor=0.1, warmup_epochs=4)
SHORTER_THAN_WARM_UP = partial(cosine, updates_per_epoch=1, total_updates=2, warmup_epochs=4)


@pytest.mark.parametrize(
    ("schedule", "updates", "expected"),
    [
        (partial(constant, updates_per_epoch=1, warmup_epochs=4), range(6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (partial(constant, updates_per_epoch=1), [0], [1.0]),
        (MULTISTEP, range(7), [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        (COSINE, (0, 3, 4, 12, 20, 21, 1000), [0.25, 1.0, 1.0, pytest.approx(0.55, abs=1e-15), 0.1, 0.1, 0.1]),
        (SHORTER_THAN_WARM_UP, range(3), [0.25, 0.5, 0.75]),
    ],
    ids=["warm-up", "no warm-up", "multistep", "cosine", "short cosine"],
)
def test_a_factor_is_what_its_formula_says(schedule, updates, expected):
    (factor,) = schedule(sgd()).lr_lambdas
    assert [factor(s) for s in updates] == expected


def test_multistep_and_cosine_are_torchs_counted_in_updates():
    ours = multistep(sgd(), updates_per_epoch=7, milestones=[1, 2.0, 2.5], gamma=0.3)
    theirs = lr_scheduler.MultiStepLR(sgd(), [7, 14, 18], gamma=0.3)
    assert learning_rates(ours, 25) == pytest.approx(learning_rates(theirs, 25), rel=1e-14)
    ours = cosine(sgd(0.2), updates_per_epoch=5, total_updates=30, final_factor=0.25)
    theirs = lr_scheduler.CosineAnnealingLR(sgd(0.2), T_max=30, eta_min=0.05)
    assert learning_rates(ours, 31) == pytest.approx(learning_rates(theirs, 31), rel=1e-12)


SCHEDULES = {
    "ours": lambda o: multistep(o, updates_per_epoch=3, milestones=[2, 4], warmup_epochs=1.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 17),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=60),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


# SequentialLR itself steps its parts with an argument that torch has deprecated.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("done", [0, 13])
def test_a_resumed_schedule_has_the_uninterrupted_ones_rates(kind, done):
    """To the bit, whether or not the optimizer's state was loaded before."""
    first = SCHEDULES[kind](sgd())
    learning_rates(first, done)
    saved = first.optimizer.state_dict()
    uninterrupted = learning_rates(first, 40 - done)
    for is_loaded in (False, True):
        resumed = SCHEDULES[kind](sgd())
        if is_loaded:
            resumed.optimizer.load_state_dict(saved)
        fast_forward(resumed, done)
        assert learning_rates(resumed, 40 - done) == uninterrupted


def test_a_schedule_gets_the_runs_length_only_if_it_asks_for_it():
    asked = {}

    def both(optimizer, updates_per_epoch, total_updates, extra):
        asked.update(updates_per_epoch=updates_per_epoch, total_updates=total_updates, extra=extra)
        return lr_scheduler.ExponentialLR(optimizer, 0.9)

    build_lr_schedule(both, sgd(), updates_per_epoch=5, total_updates=30, extra="x")
    assert asked == {"updates_per_epoch": 5, "total_updates": 30, "extra": "x"}
    built = build_lr_schedule(lr_scheduler.StepLR, sgd(), updates_per_epoch=5, total_updates=30, step_size=3)
    assert learning_rates(built, 4) == pytest.approx([0.1, 0.1, 0.1, 0.01])
    built = build_lr_schedule(cosine, sgd(1.0), updates_per_epoch=5, total_updates=30, warmup_epochs=1)
    assert learning_rates(built, 20)[-1] == pytest.approx((1 + math.cos(math.pi * 14 / 25)) / 2)


def built(target, **options):
    return build_lr_schedule(target, sgd(), updates_per_epoch=5, total_updates=30, **options)


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=9), "OneCycleLR fails after update 10 of the run's 30"),
        (lambda o: lr_scheduler.LambdaLR(o, ([1.0] * 12).__getitem__), "LambdaLR fails after update 12 .*: IndexError"),
    ],
)
def test_a_schedule_shorter_than_the_run_is_refused(make, at):
    optimizer = sgd()
    with pytest.raises(ConfigError, match=f"lr_schedule: {at}.*; make it as long as the run"):
        try_schedule(partial(make, optimizer), optimizer, 30)
    assert "initial_lr" not in optimizer.param_groups[0]


def test_a_schedule_that_fails_is_told_with_its_arguments():
    for target, passed in ((lr_scheduler.CosineAnnealingLR, "optimizer"), (cosine, r"optimizer, updates_per_.*=30")):
        told = rf"{target.__name__}, which takes \(optimizer, .* refuses \({passed}, unknown=1\): TypeError"
        with pytest.raises(ConfigError, match=told):
            built(target, unknown=1)


# --- in a run ---------------------------------------------------------------------------------------------------------


def fit(run_dir, **options):
    trainer = toy_trainer(2, 2, optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    return trainer.fit(FixedImages(20), epochs=1, batch_size=8, run_dir=run_dir, monitoring=SILENT)


def test_a_run_that_outlasts_its_schedule_does_not_start(tmp_path):
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, cycle_momentum=False)
    with pytest.raises(ConfigError, match="OneCycleLR fails after update 3 of the run's 3: ValueError: Tried to step"):
        fit(tmp_path / "short", lr_schedule=partial(cycle, total_steps=2))
    assert not (tmp_path / "short" / "checkpoints").exists()
    assert fit(tmp_path / "follows", lr_schedule=cycle)["updates"] == 3
