"""What a stage counts about itself, where it happens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepStats:
    """Counts of one group, or of an evaluation. Loss and hits exist on the last stage only.

    Attributes:
        staleness: updates between forward and update, one entry per backward.
        sizes: samples of each micro-batch that was scored.
        losses: mean over the samples of each of them; none where there is no loss.
        hits: samples of each of them whose largest output is the target; none if the task has no classes.
        gradient_norm: 2-norm of the stage's gradient of the group, before it is clipped; None without parameters.
        skipped: why the update is not made; None: it is.
        busy_seconds: time in forward, backward and update.
    """

    staleness: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    gradient_norm: Tensor | None = None
    skipped: str | None = None
    busy_seconds: float = 0.0
    _fetched: torch.cuda.Event | None = None

    def busy(self) -> "_Busy":
        """Count the time inside as busy (on a GPU: the time to launch, not to run)."""
        return _Busy(self)

    def score(self, out: Tensor | None, target: Tensor, loss: Tensor) -> None:
        """Add one micro-batch: the model's ``out`` [B, ...], ``target`` [B, ...], mean ``loss``. No host sync."""
        self.sizes.append(target.shape[0])
        self.losses.append(loss.detach())
        if out is not None and out.ndim == 2 and target.ndim == 1 and not target.is_floating_point():
            self.hits.append((out.detach().argmax(dim=1) == target).sum())

    def fetch(self) -> bool:
        """Start to copy losses, hits and norm off a GPU, for :meth:`numbers`; False: they are not on one."""
        norms = [] if self.gradient_norm is None else [self.gradient_norm]
        if not any(number.is_cuda for number in (*self.losses[:1], *norms)):
            return False
        self.losses, self.hits, norms = (_underway(of_a_kind) for of_a_kind in (self.losses, self.hits, norms))
        self.gradient_norm = norms[0] if norms else None
        self._fetched = torch.cuda.current_stream().record_event()
        return True

    def numbers(self) -> dict[str, float | int]:
        """Samples, loss sum, hits and norm as plain numbers; a number that is not there is absent."""
        if self._fetched is None:
            self.fetch()
        if self._fetched is not None:
            self._fetched.synchronize()  # with these copies, not with what was launched behind them
        told: dict[str, float | int] = {"num_samples": sum(self.sizes)}
        if self.losses:
            loss_sum = 0.0  # not by sum(), which rounds in another way since Python 3.12
            for loss, size in zip(self.losses, self.sizes, strict=True):
                loss_sum += float(loss) * size
            told["loss_sum"] = loss_sum
        if self.hits:
            told["num_correct"] = sum(map(int, self.hits))
        if self.gradient_norm is not None:
            told["gradient_norm"] = float(self.gradient_norm)
        return told


def _underway(scalars: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, in pinned memory, of what a GPU has yet to compute; filled when the stream comes to it."""
    return list(torch.stack(scalars).to("cpu", non_blocking=True)) if scalars else []


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of ``gradients``, at least one, of one device.

    As torch's ``get_total_norm``, which sorts them by device and dtype first: most of its time for a small stage.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norm


class _Busy:
    """A context manager of its own, because contextlib's takes several times as long."""

    __slots__ = ("_start", "_tally")

    def __init__(self, tally: StepStats) -> None:
        self._tally = tally

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._tally.busy_seconds += time.perf_counter() - self._start
