"""Learning rates as functions of the update index s alone: stages reach it at different times, but share gamma_s.

So a schedule may look at s, never at the clock, a metric or another stage; a resumed run finds its place by counting.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from adl_dist.errors import ConfigError


def warmup_factor(update: int, *, num_warmup_updates: int) -> float:
    """Linear warm-up: update s of W uses (s + 1) / W, so the first is not lost to a zero; 1 from s = W - 1 on."""
    return (update + 1) / num_warmup_updates if update < num_warmup_updates else 1.0


def multistep_factor(update: int, *, milestones: Sequence[int], gamma: float, num_warmup_updates: int) -> float:
    """gamma ** (milestones <= s), times the warm-up; ``milestones`` in updates."""
    passed = sum(milestone <= update for milestone in milestones)
    return float(gamma**passed) * warmup_factor(update, num_warmup_updates=num_warmup_updates)


def cosine_factor(update: int, *, total_updates: int, final_factor: float, num_warmup_updates: int) -> float:
    """Half a cosine from 1 at s = W to ``final_factor`` at s = ``total_updates`` and after; before it the warm-up.

    f + (1 - f) (1 + cos(pi (s - W) / (T - W))) / 2; like torch's, the end belongs to the update after the last one.
    """
    if update < num_warmup_updates:
        return warmup_factor(update, num_warmup_updates=num_warmup_updates)
    if update >= total_updates:
        return final_factor
    progress = (update - num_warmup_updates) / (total_updates - num_warmup_updates)
    return final_factor + (1 - final_factor) * (1 + math.cos(math.pi * progress)) / 2


def constant(optimizer: Optimizer, *, updates_per_epoch: int, warmup_epochs: float = 0.0) -> LRScheduler:
    """Keep the optimizer's own learning rate, after a linear warm-up of ``warmup_epochs``."""
    return _scheduler(optimizer, warmup_factor, warmup_epochs, updates_per_epoch)


def multistep(
    optimizer: Optimizer,
    *,
    updates_per_epoch: int,
    milestones: Sequence[float],
    gamma: float = 0.1,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Multiply the learning rate by ``gamma`` at each of ``milestones``, counted in epochs; linear warm-up before.

    Raises ConfigError for milestones that do not ascend from above 0, or a ``gamma`` not above 0.
    """
    epochs = list(milestones)
    if any(b <= a for a, b in zip([0, *epochs], epochs, strict=False)):
        raise ConfigError(f"lr_schedule.milestones must be epochs above 0 in ascending order, got {epochs}")
    if not gamma > 0:
        raise ConfigError(f"lr_schedule.gamma must be above 0, got {gamma}")
    in_updates = [round(epoch * updates_per_epoch) for epoch in epochs]
    factor = partial(multistep_factor, milestones=in_updates, gamma=gamma)
    return _scheduler(optimizer, factor, warmup_epochs, updates_per_epoch)


def cosine(
    optimizer: Optimizer,
    *,
    updates_per_epoch: int,
    total_updates: int,
    final_factor: float = 0.0,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Half a cosine down to ``final_factor`` (else ConfigError: in [0, 1]) times the rate; linear warm-up before."""
    if not 0 <= final_factor <= 1:
        raise ConfigError(f"lr_schedule.final_factor must be in [0, 1], got {final_factor}")
    factor = partial(cosine_factor, total_updates=total_updates, final_factor=final_factor)
    return _scheduler(optimizer, factor, warmup_epochs, updates_per_epoch)


def _scheduler(
    optimizer: Optimizer, factor: Callable[..., float], warmup_epochs: float, updates_per_epoch: int
) -> LRScheduler:
    if not warmup_epochs >= 0:
        raise ConfigError(f"lr_schedule.warmup_epochs must be at least 0, got {warmup_epochs}")
    return LambdaLR(optimizer, partial(factor, num_warmup_updates=round(warmup_epochs * updates_per_epoch)))


def build_lr_schedule(
    target: Callable[..., Any], optimizer: Optimizer, *, updates_per_epoch: int, total_updates: int, **options: Any
) -> LRScheduler:
    """Call one of the schedules above, a class of ``torch.optim.lr_scheduler``, or anything like them.

    ``target`` takes one stage's optimizer, ``options`` (the other keys of ``lr_schedule``), and ``updates_per_epoch``
    (the last, shorter group counts as one) and ``total_updates`` if it has parameters of these names.

    Returns:
        A scheduler to be stepped once per update: what torch calls an epoch is then an update.

    Raises:
        ConfigError: options that ``target`` does not take or refuses, or a schedule that needs a metric.
    """
    if isinstance(target, partial) and not target.args:  # the command line's
        options = {**target.keywords, **options}
        target = target.func
    signature = inspect.signature(target)
    name = getattr(target, "__name__", repr(target))
    run = {"updates_per_epoch": updates_per_epoch, "total_updates": total_updates}
    given = {**{key: value for key, value in run.items() if key in signature.parameters}, **options}
    try:
        signature.bind(optimizer, **given)
    except TypeError as error:
        keys = [key for key in list(signature.parameters)[1:] if key not in run]
        raise ConfigError(f"lr_schedule: {name} takes {', '.join(keys)}; given {options}: {error}") from error
    try:
        schedule = target(optimizer, **given)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"lr_schedule: {name} refuses {options}: {error}") from error
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "lr_schedule: ReduceLROnPlateau follows a metric, but here a learning rate is a function of the update "
            "index alone, or the stages and a resumed run would differ; use multistep or cosine"
        )
    if not isinstance(schedule, LRScheduler):
        raise ConfigError(
            f"lr_schedule: {name} must return a torch.optim.lr_scheduler.LRScheduler, got {type(schedule).__name__}"
        )
    return schedule


def fast_forward(scheduler: LRScheduler, num_updates: int) -> None:
    """Bring a fresh scheduler to where it stands after ``num_updates`` updates, to the bit.

    By stepping: many multiply the present learning rate, and a closed form differs from that in the last bit. 100,000
    updates take about a second. The optimizer's state may have been loaded already: its learning rate is that of the
    checkpoint, so it is set back to the scheduler's first one before counting.
    """
    for group, learning_rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    with warnings.catch_warnings():
        # True, and meant: these updates were made by an earlier process.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        for _ in range(num_updates):
            scheduler.step()
