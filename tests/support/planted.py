"""Numerical faults, planted where a test wants them."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.runs import MICRO_BATCH
from tests.support.toys import FixedImages

# Micro-batches of every epoch that hold a NaN, and the groups of two that they spoil: the first one, two in a row.
SPOILT, SPOILT_PAIRS = (0, 4, 6), (0, 2, 3)


def nan_inputs(model: nn.Sequential, data: FixedImages) -> None:
    """Spoil one pixel of each of those micro-batches."""
    for micro_batch in SPOILT:
        data.images[micro_batch * MICRO_BATCH + 1, 0, 2, 3] = float("nan")


class InfiniteGradient(nn.Module):
    """Changes nothing, but for the gradient of some of its training forwards, of which one sample becomes infinite."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) != MICRO_BATCH:  # stages try each other out with fewer samples
            return x
        self.calls += 1
        return _Spoil.apply(x) if self.calls - 1 in self.at else x  # type: ignore[no-any-return,no-untyped-call]


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        spoilt = grad.clone()
        spoilt[0] = float("inf")  # a single element might meet a ReLU that is off
        return spoilt


def infinite_gradient(model: nn.Sequential, data: FixedImages) -> None:
    """In unit 3, of micro-batch 5 of the first epoch."""
    model[3] = InfiniteGradient(5)
