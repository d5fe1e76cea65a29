"""Learning rates around one update of one stage."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@contextmanager
def scaled_learning_rates(optimizer: Optimizer | None, factor: float) -> Iterator[None]:
    """Multiply every learning rate by ``factor`` inside."""
    # Around the step, not once and for all: some schedules set the learning rate, whatever it was.
    groups = optimizer.param_groups if optimizer and factor != 1.0 else []
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    yield
    for group, rate in zip(groups, before, strict=True):
        group["lr"] = rate


def step_schedule(schedule: LRScheduler, *, skipped: bool) -> None:
    """Move on to the learning rate of the next update, this one having been applied or ``skipped``."""
    if not skipped:
        schedule.step()
        return
    with warnings.catch_warnings():
        # True, and meant, where the very first update is skipped.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        schedule.step()
