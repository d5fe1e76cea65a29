"""Numerical faults, planted where a test wants them."""

from torch import nn

from tests.support.runs import MICRO_BATCH

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
