"""What a stage counts about itself, where it happens."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tally:
    """Counts of one group, or of an evaluation. Loss and hits exist on the last stage only.

    Attributes:
        staleness: updates between forward and update, one entry per backward.
        num_samples: samples that went through.
        loss_sum: sum of the loss over samples; None where there is no loss.
        num_correct: samples whose largest output is the target; None if the task has no classes.
        gradient_norm: 2-norm of the stage's gradient of the group, before it is clipped; None without parameters.
        skipped: why the update is not made; None: it is.
        busy_seconds: time in forward, backward and update.
    """

    staleness: list[int] = field(default_factory=list)
    num_samples: int = 0
    loss_sum: Tensor | None = None
    num_correct: Tensor | None = None
    gradient_norm: Tensor | None = None
    skipped: str | None = None
    busy_seconds: float = 0.0
    _fetched: torch.cuda.Event | None = None

    def busy(self) -> "_Busy":
        """Count the time inside as busy (on a GPU: the time to launch, not to run)."""
        return _Busy(self)

    def score(self, out: Tensor | None, target: Tensor, loss: Tensor) -> None:
        """Add one micro-batch: the model's ``out`` [B, ...], ``target`` [B, ...], mean ``loss``. No host sync."""
        size = target.shape[0]
        self.num_samples += size
        # Sums are kept in float64 so that an average over an epoch does not depend on its length.
        loss_sum = loss.detach().double() * size
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        if out is not None and out.ndim == 2 and target.ndim == 1 and not target.is_floating_point():
            correct = (out.detach().argmax(dim=1) == target).sum()
            self.num_correct = correct if self.num_correct is None else self.num_correct + correct

    def fetch(self) -> bool:
        """Start to copy loss, hits and norm off a GPU, for :meth:`numbers`; False: they are not on one."""
        if not any(number is not None and number.is_cuda for number in (self.loss_sum, self.gradient_norm)):
            return False
        for name in ("loss_sum", "num_correct", "gradient_norm"):
            if (number := getattr(self, name)) is not None:
                setattr(self, name, number.to("cpu", non_blocking=True))  # which torch gives pinned memory
        self._fetched = torch.cuda.current_stream().record_event()
        return True

    def numbers(self) -> dict[str, float | int]:
        """Samples, loss sum, hits and norm as plain numbers; a number that is not there is absent."""
        if self._fetched is not None:
            self._fetched.synchronize()  # with these copies, not with what was launched behind them
        told: dict[str, float | int] = {"num_samples": self.num_samples}
        if self.loss_sum is not None:
            told["loss_sum"] = float(self.loss_sum)
        if self.num_correct is not None:
            told["num_correct"] = int(torch.as_tensor(self.num_correct))
        if self.gradient_norm is not None:
            told["gradient_norm"] = float(self.gradient_norm)
        return told


class _Busy:
    """A context manager of its own, because contextlib's takes several times as long."""

    __slots__ = ("_start", "_tally")

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._tally.busy_seconds += time.perf_counter() - self._start
