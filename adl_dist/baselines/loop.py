"""The training loop that everybody writes, on one device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batches = Iterator[tuple[Tensor, Tensor]]
LossFn = Callable[[Any, Tensor], Tensor]


class Clock:
    """Notes when each update ended; on a GPU by an event, because a loop that waited for it would be slower."""

    def __init__(self, device: torch.device) -> None:
        """Measure on ``device``."""
        self._device = device
        self._marks: list[Any] = []

    def tick(self) -> None:
        """Note the present moment, in the order of what ``device`` has been given to do."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The moments since the first of them, in seconds; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [self._marks[0].elapsed_time(mark) / 1000 for mark in self._marks]
        return [mark - self._marks[0] for mark in self._marks]


@dataclass(kw_only=True)
class Updates:
    """What happens at the end of each update.

    Attributes:
        optimizer: of the parameters here; None: there are none.
        lr_schedule: stepped once per update.
        clock: told of each update.
    """

    optimizer: Optimizer | None
    lr_schedule: LRScheduler | None
    clock: Clock

    def apply(self) -> None:
        """Take one step with the gradients that have come together, and forget them."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        self.clock.tick()


def train_alone(
    model: nn.Module, batches: Batches, *, num_updates: int, micro_batches: int, loss_fn: LossFn, updates: Updates
) -> None:
    """Train on one device, accumulating the gradients of some micro-batches for each update.

    Args:
        model: on its device; takes an input [B, ...].
        batches: micro-batches (input on that device, target), of one size.
        num_updates: how long.
        micro_batches: of one update; 1: the whole batch at once.
        loss_fn: (output, target) to the mean over the samples.
        updates: what ends an update.
    """
    model.train()
    for _ in range(num_updates):
        for _ in range(micro_batches):
            input_, target = next(batches)
            loss = loss_fn(model(input_), target.to(input_.device, non_blocking=True))
            (loss / micro_batches).backward()
        updates.apply()
