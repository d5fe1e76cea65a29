"""What a user might name in ``_target_``, with the mistakes that users make."""

import os
import signal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_CLASSES = 10
answer = 42  # is there, and is nothing to call


def units() -> list[nn.Sequential]:
    """Four units for images [B, 3, 8, 8]."""
    return [
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8)),
        nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
        nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
        nn.Sequential(nn.ReLU(), nn.Linear(8, NUM_CLASSES)),
    ]


def good() -> nn.Sequential:
    return nn.Sequential(*units())


class Branching(nn.Module):
    """A model whose way depends on its input, so that nobody can see its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*units())

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        out: Tensor = self.net(x)
        return out


def tied() -> nn.Sequential:
    """The first and the last unit share a tensor, so that there is no place to cut."""
    parts, shared = units(), nn.Linear(8, 8)
    parts[0], parts[-1] = nn.Sequential(parts[0], nn.ReLU(), shared), nn.Sequential(nn.Linear(8, 8), parts[-1])
    parts[-1][0].weight = shared.weight
    return nn.Sequential(*parts)


class MeanOverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=0)


def drops_the_batch(at: int = 3) -> nn.Sequential:
    parts = units()
    parts[at] = nn.Sequential(parts[at], MeanOverBatch())
    return nn.Sequential(*parts)


def second_half_does_not_fit() -> nn.Sequential:
    """The third unit, the first one of stage 1 of 2, expects more than the second gives."""
    parts = units()
    parts[2] = nn.Sequential(nn.ReLU(), nn.Linear(9, 8))
    return nn.Sequential(*parts)


def raises() -> nn.Module:
    raise LookupError("no such weights\non any server")


def no_module() -> str:
    return "resnet"


class Images(Dataset[tuple[Tensor, int]]):
    """Images [3, 8, 8]; the last one has ``last_target``."""

    def __init__(self, num_samples: int, last_target: int = 0) -> None:
        self.num_samples, self.last_target = num_samples, last_target

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        is_last = index == self.num_samples - 1
        return torch.full((3, 8, 8), index / 100), self.last_target if is_last else index % NUM_CLASSES


def images(num_samples: int = 32, num_validation: int = 8, last_target: int = 0) -> tuple[Images, Images]:
    return Images(num_samples, last_target), Images(num_validation)


def bad_validation_target() -> tuple[Images, Images]:
    return Images(32), Images(8, last_target=NUM_CLASSES)


def one_dataset() -> Images:
    return Images(32)


def a_list() -> tuple[list[int], list[int]]:
    return list(range(64)), list(range(8))


class Explodes(nn.Module):
    """Gives NaN from the n-th training forward on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.calls = after, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * float("nan") if self.calls > self.after else x


def explodes(after: int) -> nn.Sequential:
    """With four micro-batches in an update, after=4 leaves the first update alone."""
    return nn.Sequential(*units(), Explodes(after))


class InfiniteLoss(nn.CrossEntropyLoss):
    """Infinite for every micro-batch, but not for the two samples that the stages try each other out with."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().forward(output, target)
        return loss * float("inf") if len(target) > 2 else loss


class Faulty(nn.Module):
    """Fails in the n-th training forward in a way that nobody foresaw."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == self.at:
            self.fail()
        return x

    def fail(self) -> None:
        raise KeyError("a bug of the user's")


class Killed(Faulty):
    """Ends its process in the n-th training forward."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def faulty(at: int) -> nn.Sequential:
    return nn.Sequential(*units(), Faulty(at))


def killed(at: int) -> nn.Sequential:
    return nn.Sequential(*units(), Killed(at))


def no_optimizer(params: object, **_: object) -> list[object]:
    return [params]


def faulty_at_the_start(at: int) -> nn.Sequential:
    return nn.Sequential(Faulty(at), *units())
