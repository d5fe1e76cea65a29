"""Learning rates as functions of the update index s.

Stages reach an update at different times, but share its rate gamma_s. A schedule depends only on s, never on the clock,
a metric or another stage. A resumed run steps its schedule again up to its update.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from adl_dist.errors import AdlError, ConfigError, in_one_line

# Updates for which a schedule is tried at the start, in about a second.
MOST_TRIED = 100_000


def constant(optimizer: Optimizer, *, updates_per_epoch: int, warmup_epochs: float = 0.0) -> LRScheduler:
    """Keep the optimizer's learning rate after a linear warm-up."""
    return _scheduler(optimizer, lambda update: 1.0, warmup_epochs, updates_per_epoch)


def multistep(
    optimizer: Optimizer,
    *,
    updates_per_epoch: int,
    milestones: Sequence[float],
    gamma: float = 0.1,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Multiply the learning rate by ``gamma`` at each of ``milestones``.

    Milestones are epochs since the start of the run, which begins with a linear warm-up of ``warmup_epochs``.

    Raises:
        ConfigError: If milestones do not ascend from above 0, or ``gamma`` is not above 0.
    """
    epochs = list(milestones)
    if any(b <= a for a, b in zip([0, *epochs], epochs, strict=False)):
        raise ConfigError(f"lr_schedule.milestones must be epochs above 0 in ascending order, got {epochs}")
    if not gamma > 0:
        raise ConfigError(f"lr_schedule.gamma must be above 0, got {gamma}")
    in_updates = [round(epoch * updates_per_epoch) for epoch in epochs]

    def factor(update: int) -> float:
        return float(gamma ** sum(milestone <= update for milestone in in_updates))

    return _scheduler(optimizer, factor, warmup_epochs, updates_per_epoch)


def cosine(
    optimizer: Optimizer,
    *,
    updates_per_epoch: int,
    total_updates: int,
    final_factor: float = 0.0,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Decay the learning rate by half a cosine, after a linear warm-up.

    From update W, the end of the warm-up, to T = ``total_updates`` the optimizer's rate is multiplied by
    f + (1 - f) (1 + cos(pi (s - W) / (T - W))) / 2, with f = ``final_factor`` in [0, 1]. As in torch, f itself is
    reached at update T, one after the last.
    """
    if not 0 <= final_factor <= 1:
        raise ConfigError(f"lr_schedule.final_factor must be in [0, 1], got {final_factor}")
    num_warmup = round(warmup_epochs * updates_per_epoch)

    def factor(update: int) -> float:
        if update < num_warmup:
            return 1.0
        if update >= total_updates:
            return final_factor
        progress = (update - num_warmup) / (total_updates - num_warmup)
        return final_factor + (1 - final_factor) * (1 + math.cos(math.pi * progress)) / 2

    return _scheduler(optimizer, factor, warmup_epochs, updates_per_epoch)


def _scheduler(
    optimizer: Optimizer, factor: Callable[[int], float], warmup_epochs: float, updates_per_epoch: int
) -> LRScheduler:
    """Scale the rate by ``factor(s)``, and by (s + 1) / W before update W."""
    if not warmup_epochs >= 0:
        raise ConfigError(f"lr_schedule.warmup_epochs must be at least 0, got {warmup_epochs}")
    W = round(warmup_epochs * updates_per_epoch)
    return LambdaLR(optimizer, lambda update: factor(update) * ((update + 1) / W if update < W else 1.0))


def build_lr_schedule(
    target: Callable[..., Any], optimizer: Optimizer, *, updates_per_epoch: int, total_updates: int, **options: Any
) -> LRScheduler:
    """Build a schedule, to be stepped once per update.

    ``target`` is a function of this module, a class of ``torch.optim.lr_scheduler``, or a function like them. If it has
    parameters ``updates_per_epoch``, ``total_updates`` or ``total_steps``, it gets the run's length. The last, shorter
    group of an epoch counts as an update. ``options`` are the other keys of ``lr_schedule``.

    Raises:
        ConfigError: If ``target`` does not accept the options, follows a metric, or returns no LRScheduler.
    """
    if isinstance(target, partial) and not target.args:  # the command line's
        options = {**target.keywords, **options}
        target = target.func
    name, takes = _name_of(target), [*inspect.signature(target).parameters]
    given = {**_length_for(target, takes, options, updates_per_epoch, total_updates), **options}
    try:
        schedule = target(optimizer, **given)
    except AdlError:
        raise
    except Exception as error:  # the user's own code
        passed = ", ".join(["optimizer", *(f"{key}={value!r}" for key, value in given.items())])
        raise ConfigError(
            f"lr_schedule: {name}, which takes ({', '.join(takes)}), refuses ({passed}): {in_one_line(error)}; "
            "give its options by functools.partial, or as keys of lr_schedule"
        ) from error
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "lr_schedule: ReduceLROnPlateau follows a metric, but a rate must depend only on the update index, "
            "so that stages and resumed runs agree; use multistep or cosine"
        )
    if not isinstance(schedule, LRScheduler):
        raise ConfigError(
            f"lr_schedule: {name} must return a torch.optim.lr_scheduler.LRScheduler, got {type(schedule).__name__}"
        )
    return schedule


def _check_factors(groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise ConfigError if the schedule ``name`` has undone ``lr_factor``.

    Then groups with different rates ``before`` have one rate.
    """
    pairs = {(float(old["lr"]), float(group["lr"])) for old, group in zip(before, groups, strict=True) if group["lr"]}
    if any("lr_factor" in group for group in groups) and len({rate for _, rate in pairs}) < len(pairs):
        raise ConfigError(
            f"lr_schedule: {name} sets the rates of all groups, and lr_factor of optimizer.rules would be lost; give "
            f"it a list of {len(groups)} rates, one for each group, or a schedule that multiplies the optimizer's"
        )


def _length_for(
    target: Callable[..., Any], takes: Sequence[str], options: Mapping[str, Any], updates_per_epoch: int, total: int
) -> dict[str, int]:
    """Return the length of the run as arguments of ``target`` not yet given."""
    run = {"updates_per_epoch": updates_per_epoch, "total_updates": total, "total_steps": total}
    given = {*options, *(target.keywords if isinstance(target, partial) else ())}
    if given & {"epochs", "steps_per_epoch"}:  # OneCycleLR's other way to say how long it is
        given.add("total_steps")
    return {key: value for key, value in run.items() if key in takes and key not in given}


def _name_of(target: object) -> str:
    while isinstance(target, partial):
        target = target.func
    return getattr(target, "__name__", None) or type(target).__name__


def try_schedule(make: Callable[[], LRScheduler], optimizer: Optimizer, total_updates: int) -> set[str]:
    """Step a schedule through a run; return the param group keys that it sets.

    At most ``MOST_TRIED`` updates are tried. ``make`` builds the schedule of ``optimizer``, whose groups are restored
    at the end.

    Raises:
        ConfigError: If the schedule is shorter than the run, or raises otherwise.
    """
    groups, done = optimizer.param_groups, 0
    first = [dict(group) for group in groups]
    contents = [(v, v.clone()) for group in groups for v in group.values() if isinstance(v, Tensor)]
    scheduled = {"lr", "initial_lr"}

    def look() -> None:
        for group, before in zip(groups, first, strict=True):
            scheduled.update(key for key, value in group.items() if key not in scheduled and _moved(value, before, key))

    schedule = make()
    try:
        look()
        with _without_order_warning():
            while done < min(total_updates, MOST_TRIED):
                _check_factors(groups, first, type(schedule).__name__)
                schedule.step()
                look()
                done += 1
        if isinstance(length := getattr(schedule, "total_steps", None), int) and length < total_updates:
            done = length
            raise ValueError(f"it has total_steps={length}")
    except AdlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"lr_schedule: {type(schedule).__name__} fails after update {done + 1} of the run's {total_updates}: "
            f"{in_one_line(error)}; make it as long as the run"
        ) from error
    finally:
        for group, before in zip(groups, first, strict=True):
            group.clear()
            group.update(before)
        for tensor, content in contents:
            tensor.copy_(content)
    return scheduled


def _moved(value: Any, before: Mapping[str, Any], key: str) -> bool:
    return key not in before or (value is not before[key] and (isinstance(value, Tensor) or value != before[key]))


@contextmanager
def _without_order_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        # Intended: these updates were made by an earlier process, or will never be made.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        yield


def fast_forward(scheduler: LRScheduler, num_updates: int) -> None:
    """Step a fresh scheduler ``num_updates`` times.

    Many schedulers multiply the present learning rate, and a closed form would differ in the last bit. 100,000 updates
    take about a second. The optimizer's rate is reset first, because it may come from a checkpoint.
    """
    for group, learning_rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    with _without_order_warning():
        for _ in range(num_updates):
            scheduler.step()
