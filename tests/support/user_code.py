"""What a user might name in ``_target_``, with the mistakes that users make."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

NUM_CLASSES = 10
answer = 42  # is there, and is nothing to call


def units():
    """Four units for images [B, 3, 8, 8]."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8))
    return [first, *(nn.Sequential(nn.ReLU(), nn.Linear(8, width)) for width in (8, 8, NUM_CLASSES))]


def good():
    return nn.Sequential(*units())


class Branching(nn.Module):
    """A model whose way depends on its input, so that its blocks cannot be seen."""

    def __init__(self):
        super().__init__()
        self.net = good()

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.net(x)


def second_half_does_not_fit():
    """The third unit, the first one of stage 1 of 2, expects more than the second gives."""
    parts = units()
    parts[2] = nn.Sequential(nn.ReLU(), nn.Linear(9, 8))
    return nn.Sequential(*parts)


class Shared(nn.Module):
    """Multiplies by a number that all of its objects share, so that no stage has counted all calls."""

    calls = 0

    def forward(self, x):
        Shared.calls += 1
        return x * (1 + Shared.calls / 10)


def shares_a_number():
    return nn.Sequential(Shared(), *units(), Shared())


def raises():
    raise LookupError("no such weights\non any server")


def exits():
    sys.exit(3)


def exits_at(at):
    return nn.Sequential(*units(), At(at, exits))


def no_module():
    return "resnet"


class Images(Dataset):
    """Images [3, 8, 8]; the last one has ``last_target``."""

    def __init__(self, num_samples, last_target=0):
        self.num_samples, self.last_target = num_samples, last_target

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        is_last = index == self.num_samples - 1
        return torch.full((3, 8, 8), index / 100), self.last_target if is_last else index % NUM_CLASSES


def images(num_samples=32, num_validation=8, last_target=0):
    return Images(num_samples, last_target), Images(num_validation)


def bad_validation_target():
    return Images(32), Images(8, last_target=NUM_CLASSES)


def a_list():
    return list(range(64)), list(range(8))


class Explodes(nn.Module):
    """Gives NaN from the n-th training forward on."""

    def __init__(self, after):
        super().__init__()
        self.after, self.calls = after, 0

    def forward(self, x):
        self.calls += self.training
        return x * (float("nan") if self.calls > self.after else 1.0)


def explodes(after):
    """With four micro-batches in an update, after=4 leaves the first update alone."""
    return nn.Sequential(*units(), Explodes(after))


class InfiniteLoss(nn.CrossEntropyLoss):
    """Infinite for every micro-batch, but not for the two samples that the stages try each other out with."""

    def forward(self, output, target):
        loss = super().forward(output, target)
        return loss * float("inf") if len(target) > 2 else loss


class At(nn.Module):
    """Passes its input on; calls ``act`` in the n-th forward of training, or in the backward of that.

    The count is a buffer, so one stage runs it: a module that counts in an attribute runs on all stages.
    """

    def __init__(self, n, act, *, backward=False):
        super().__init__()
        self.register_buffer("left", torch.tensor(n), persistent=False)
        self._act, self._backward = act, backward

    def forward(self, x):
        self.left -= int(self.training)
        if self.left == 0 and not self._backward:
            self._act()
        elif self.left == 0 and x.requires_grad:
            x.register_hook(lambda grad: self._act())
        return x


def fail():
    raise KeyError("a bug of the user's")


def faulty(at):
    return nn.Sequential(*units(), At(at, fail))


def faulty_at_the_start(at):
    return nn.Sequential(At(at, fail), *units())


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.5 GiB free.")


def hungry(at):
    return nn.Sequential(*units(), At(at, run_out_of_memory))


def killed(at):
    return nn.Sequential(*units(), At(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def gone(at):
    return nn.Sequential(*units(), At(at, lambda: os._exit(7)))


def cross_entropy(output, target, scale=1.0):
    """The loss itself, not a function that makes it."""
    return scale * nn.functional.cross_entropy(output, target)


def loss_of_nothing(output, target):
    nn.functional.cross_entropy(output, target)


def sum_and_count(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)


def column(width=1):
    return nn.Sequential(*units(), nn.ReLU(), nn.Linear(NUM_CLASSES, width))


class Measured(Images):
    """Images with a number, not a class."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], torch.tensor(index / 10)


def measured():
    return Measured(32), Measured(8)


class RaisesAt(Images):
    def __getitem__(self, index):
        return super().__getitem__(index // (index - 20))


def raises_at_a_sample():
    return RaisesAt(32), Images(8)


def no_optimizer(params, **_):
    return [params]
