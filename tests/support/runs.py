"""One way to run the trainer for the equality tests, in one process or as one of K ranks."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import adl_dist
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET, values

MICRO_BATCH, NUM_SAMPLES, EPOCHS = 3, 32, 3  # 11 micro-batches: no multiple of 2, 3, 4; the last one holds 2
BALANCE = {1: [7], 2: [3, 4], 3: [2, 4, 1], 4: [1, 3, 2, 1]}
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-2


def warm_up(update: int) -> float:
    """A factor that is another one at every update of the test."""
    return 0.2 + 0.05 * update


def warm_up_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def train(K: int, M: int, dtype: torch.dtype, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train the toy net as :func:`trained` does; return its full state and the summary."""
    trainer, summary = trained(K, M, dtype, **options)
    return trainer.full_state_dict(), summary


def trained(
    K: int,
    M: int,
    dtype: torch.dtype,
    *,
    method: str = "adl",
    options: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    shuffle: bool = False,
    epochs: int = EPOCHS,
    model: Callable[[], nn.Module] | None = None,
    num_samples: int = NUM_SAMPLES,
    plant: Callable[[nn.Sequential, FixedImages], None] | None = None,
    run_dir: Path | None = None,
    **of_trainer: Any,
) -> tuple[adl_dist.Trainer, dict[str, Any]]:
    """Train the toy net or another ``model``, with a fault that ``plant`` has planted in it or its data.

    Returns:
        The trainer, which takes ``of_trainer`` too, by names of fields of its values, and the summary.
    """
    net: Any = batch_norm_net(dropout=dropout) if model is None else model()
    data = FixedImages(num_samples, dtype=dtype)
    if plant is not None:
        plant(net, data)
    of_trainer = {"balance": BALANCE[K], "dtype": dtype, "timeout_seconds": 30, **of_trainer}
    trainer = toy_trainer(
        K, M, method, options, model=net, optimizer=optimizer, lr_schedule=warm_up_schedule, **of_trainer
    )
    summary = trainer.fit(
        data,
        epochs=epochs,
        batch_size=MICRO_BATCH * M,
        val_dataset=FixedImages(10, seed=1, dtype=dtype),
        shuffle=shuffle,
        run_dir=run_dir,
        monitoring=QUIET,
    )
    return trainer, summary


def toy_trainer(
    K: int = 2,
    M: int = 1,
    method: str = "adl",
    options: Mapping[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    lr_schedule: Callable[..., Any] | None = None,
    **of_trainer: Any,
) -> adl_dist.Trainer:
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
    return adl_dist.Trainer(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        num_stages=2,
        **values(threads=1, **options),
    )
