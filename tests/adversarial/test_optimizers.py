"""Odd optimizers and schedules: each trains as the equations say, or is refused by name before the first update.

What is right comes from one uncut model in plain torch (oracle.py).
"""

import functools
import itertools

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.optimizers import mark_roles
from tests.adversarial.optimizers import BUILDS, NUM_CLASSES, OPTIMIZERS, REFUSED, net
from tests.adversarial.oracle import Uncut
from tests.support.runs import pick, toy_trainer
from tests.support.values import SILENT

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what it has deprecated
M, MICRO_BATCH, NUM_SAMPLES, EPOCHS = 2, 3, 23, 2
BALANCE = {1: [7], 2: [3, 4], 3: [1, 2, 4]}
TOLERANCE = 1e-10  # relative to the largest element of a tensor
LOSS = nn.CrossEntropyLoss()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def model_of(build):
    torch.manual_seed(0)
    return build().double()


def slow_start(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.4 + 0.05 * update)


def trained(optimizer, K, build=net, schedule=slow_start):
    options = {"balance": BALANCE[K], "dtype": torch.float64, "lr_schedule": schedule}
    trainer = toy_trainer(K, M, model=model_of(build), optimizer=optimizer, loss_fn=LOSS, **options)
    with pick(min):
        trainer.fit(data(), epochs=EPOCHS, batch_size=MICRO_BATCH * M, shuffle=False, monitoring=SILENT)
    return trainer.full_state_dict()


def expected(optimizer, K, build=net, schedule=slow_start):
    model = model_of(build)
    mark_roles(model)
    bounds = itertools.pairwise(itertools.accumulate(BALANCE[K], initial=0))
    own = [[p for unit in model[a:b] for p in unit.parameters()] for a, b in bounds]
    uncut = Uncut(model, own, optimizer, LOSS, M=M, lr_schedule=schedule)
    x, y = data().tensors
    for _ in range(EPOCHS):
        uncut.epoch(list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True)))
    return model.state_dict()


def differing(found, right):
    """Return where two states differ by more than rounding."""
    off = {name: float((found[name] - t).abs().max()) / max(float(t.abs().max()), 1e-6) for name, t in right.items()}
    return {name: how for name, how in off.items() if how > TOLERANCE}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED])
def test_an_odd_optimizer_trains_like_plain_torch(name):
    build = BUILDS.get(name, net)
    found, right = (train(OPTIMIZERS[name], 3, build) for train in (trained, expected))
    assert differing(found, right) == {}
    assert differing(found, model_of(build).state_dict()) != {}


@pytest.mark.parametrize(("name", "word"), REFUSED.items())
@pytest.mark.parametrize("K", [2])
def test_an_optimizer_that_cannot_train_is_refused(name, word, K):
    with pytest.raises(adl_dist.AdlError, match=word) as error:
        trained(OPTIMIZERS[name], K)
    assert error.value.exit_code == 2
    assert "unexpected" not in str(error.value)


def test_an_optimizer_of_the_whole_model_is_refused():
    model = model_of(net)
    with pytest.raises(adl_dist.AdlError, match="stage 0: the optimizer holds parameters that are not of this stage"):
        trained(lambda _: torch.optim.SGD(model.parameters(), lr=0.05), 2, lambda: model)


schedulers = torch.optim.lr_scheduler
SCHEDULES = {
    "one_cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "in_sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.8)]
    ),
}
momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rates_that_torch_gives(name):
    found, right = (train(momentum, 3, schedule=SCHEDULES[name]) for train in (trained, expected))
    assert differing(found, right) == {}


@pytest.mark.parametrize(
    "schedule", [lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=5), schedulers.ReduceLROnPlateau]
)
def test_a_schedule_that_cannot_be_stepped_is_refused(schedule):
    with pytest.raises(adl_dist.AdlError, match="schedule"):
        trained(momentum, 2, schedule=schedule)


def test_a_wrong_result_is_seen():
    found, right = trained(momentum, 3), expected(functools.partial(momentum, lr=0.049), 3)
    assert differing(found, right) != {}
