"""One way to run the trainer for the equality tests, in one process or as one of K ranks."""

import functools
from unittest.mock import patch

import torch
from torch import nn

import adl_dist
from adl_dist.control import worker
from adl_dist.schedule import interleave
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT, values

MICRO_BATCH, NUM_SAMPLES, EPOCHS = 3, 32, 2  # 11 micro-batches: no multiple of 2, 3, 4; the last one holds 2
BALANCE = {1: [7], 2: [3, 4], 3: [2, 4, 1], 4: [1, 3, 2, 1]}
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-2


sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def warm_up(update):
    """A factor that is another one at every update of the test."""
    return 0.2 + 0.05 * update


def warm_up_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def train(K, M, dtype, **options):
    """Train the toy net as :func:`trained` does; return its full state and the summary."""
    trainer, summary = trained(K, M, dtype, **options)
    return trainer.full_state_dict(), summary


def trained(
    K, M, dtype, *, method="adl", options=None, dropout=0.0, optimizer=sgd, shuffle=False, epochs=EPOCHS, model=None,
    num_samples=NUM_SAMPLES, plant=None, run_dir=None, **of_trainer
):  # fmt: skip
    """Train the toy net or another ``model``, with a fault that ``plant`` has planted in it or its data.

    Without the comparison at the start: the tests themselves compare.

    Returns:
        The trainer, which takes ``of_trainer`` too, by names of fields of its values, and the summary.
    """
    net = batch_norm_net(dropout=dropout) if model is None else model()
    data = FixedImages(num_samples, dtype=dtype)
    if plant is not None:
        plant(net, data)
    always = {"balance": BALANCE.get(K), "dtype": dtype, "timeout_seconds": 30, "verify": False}
    of_trainer = always | {"lr_schedule": warm_up_schedule} | of_trainer
    trainer = toy_trainer(K, M, method, options, model=net, optimizer=optimizer, **of_trainer)
    validation, more = FixedImages(10, seed=1, dtype=dtype), {"shuffle": shuffle, "run_dir": run_dir}
    more |= {"epochs": epochs, "batch_size": MICRO_BATCH * M, "monitoring": SILENT}
    return trainer, trainer.fit(data, val_dataset=validation, **more)


def toy_trainer(
    K=2, M=1, method="adl", options=None, *, model=None, loss_fn=None, optimizer=sgd, lr_schedule=None, **of_trainer
):
    """Return a trainer of the toy net cut unevenly, or of ``model``; ``of_trainer`` are fields of its values."""
    if model is None:
        of_trainer = {"balance": BALANCE[K], **of_trainer}
    return adl_dist.Trainer(
        model or batch_norm_net(),
        loss_fn=loss_fn or nn.CrossEntropyLoss(),
        optimizer=optimizer,
        method=adl_dist.method(method, accumulation_steps=M, **(options or {})),
        num_stages=K,
        lr_schedule=lr_schedule,
        **values(threads=1, **of_trainer),
    )


def trainer_of(model, **options):
    return toy_trainer(M=4, model=model, optimizer=functools.partial(torch.optim.SGD, lr=LR), **options)


def pick(pick_next):
    """Let ``pick_next`` choose the stage that continues, where all are in one process; any choice gives one result."""
    return patch.object(worker, "interleave", functools.partial(interleave, pick_next=pick_next))


# --- Faults for ``plant`` ---------------------------------------------------------------------------------------

# Micro-batches of every epoch that hold a NaN, and the groups of two that they spoil: the first one, two in a row.
SPOILT, SPOILT_PAIRS = (0, 4, 6), (0, 2, 3)


def nan_inputs(model, data):
    """Spoil one pixel of each of those micro-batches."""
    for micro_batch in SPOILT:
        data.images[micro_batch * MICRO_BATCH + 1, 0, 2, 3] = float("nan")


class InfiniteGradient(nn.Module):
    """Changes nothing, except the gradient of one training forward, of which one sample becomes infinite."""

    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x):
        if not self.training or len(x) != MICRO_BATCH:  # stages try each other out with fewer samples
            return x
        self.calls += 1
        if self.calls - 1 == self.at:
            x = x.clone()
            x.register_hook(spoilt)
        return x


def spoilt(grad):
    grad = grad.clone()
    grad[0] = float("inf")  # a single element might meet a ReLU that is off
    return grad


def infinite_gradient(model, data):
    """In unit 3, of micro-batch 5 of the first epoch."""
    model[3] = InfiniteGradient(5)
