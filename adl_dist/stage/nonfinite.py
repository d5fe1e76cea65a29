"""Numerical faults: stop the run, or skip the group in all stages.

Stages update a group one after another, the last one first. So that a group is skipped in all stages or in none, the
last stage decides, and its decision travels in the place of a gradient: NaN in every element of the last gradient of
the group. A stage that receives NaN skips the group and sends NaN; a stage that gets no gradients has none to apply. A
fault that arises further upstream, in a backward from finite gradients, comes too late for that and stops the run.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adl_dist.batch import Tensors
from adl_dist.errors import DivergedError
from adl_dist.stage.calls import takes_gradient
from adl_dist.stage.stats import StepStats, norm_of
from adl_dist.stage_options import GradientPolicy


class NonFiniteCheck:
    """The check of loss and gradient of each update of one stage.

    On a CPU values are read at once. On a GPU the work has only been launched by then, and reading a number would wait
    for all of it. So each update is checked one update later, and the last ones at the end of the segment. Only if
    updates may be skipped does the host wait for the GPU, once per update, because the next message depends on the
    check. A split backward on a CPU is also checked later: the gradients of the weights do not exist yet when the last
    gradient of the group is sent upstream.
    """

    def __init__(self, guard: GradientPolicy, *, stage: int, is_last: bool, reads_late: bool = False) -> None:
        """Check one stage.

        Args:
            guard: the treatment of values that are not finite.
            stage: k.
            is_last: whether it is the last stage.
            reads_late: whether to read values one update later, as on a GPU; a split backward needs it, because a group
                is complete only after its last send.
        """
        self._guard, self._stage, self._is_last, self._reads_late = guard, stage, is_last, reads_late
        self._unseen: deque[tuple[int, int, StepStats]] = deque()  # update, epoch, and what holds its figures
        self._sent: list[Tensor] = []  # norms of what went upstream for the group, where updates may be skipped
        self._num_in_a_row = 0

    def forget(self) -> None:
        """Drop the state of an interrupted segment."""
        self._unseen.clear()
        self._sent.clear()

    def sent(self, grads: Tensors) -> None:
        """Note the norm of the gradients that go upstream for one micro-batch."""
        if self._guard.skips and grads:
            self._sent.append(norm_of(grads))

    def judge(self, tally: StepStats, arrived: Tensors, *, update: int, epoch: int) -> str | None:
        """Judge a complete group before its last gradients go upstream.

        ``tally`` has the group's loss and gradient norm; ``arrived`` are its last gradients from downstream. Return the
        reason if the group is skipped, or None if it is applied.

        Raises:
            DivergedError: If a value of this update, or of the one before, is not finite and cannot be skipped.
        """
        if not self._guard.skips:
            is_late = tally.fetch(arrived) or self._reads_late
            # A GPU is waited for also where nothing is looked at, or its host would be ever more updates ahead.
            if is_late or tally.losses or tally.gradient_norm is not None:
                self._unseen.append((update, epoch, tally))
                self.check(except_last=1 if is_late else 0)
            return None
        norms, self._sent = self._sent, []
        if not self._is_last and any(grad.numel() > 0 and bool(grad.isnan().all()) for grad in arrived):
            return "the last stage has skipped it"
        fault = _fault(tally)
        if fault is None and not all(math.isfinite(float(norm)) for norm in norms):
            fault = "a gradient that goes upstream is not finite"
        if fault is None:
            self._num_in_a_row = 0
            return None
        if self._is_last:
            self._num_in_a_row += 1
            if self._num_in_a_row <= self._guard.max_skipped:
                return fault
            fault += f", and train.max_skipped={self._guard.max_skipped} updates in a row have been skipped"
        else:
            fault += ", though the stages downstream, which have applied theirs by now, sent finite ones; "
            fault += "train.non_finite=skip skips what shows in the last stage"
        raise DivergedError(fault, stage=self._stage, update=update, epoch=epoch)

    def check(self, *, except_last: int = 0) -> None:
        """Raise DivergedError for unchecked updates that are not finite."""
        while len(self._unseen) > except_last:
            update, epoch, tally = self._unseen.popleft()
            if (fault := _fault(tally)) is not None:
                raise DivergedError(fault, stage=self._stage, update=update, epoch=epoch)


@contextmanager
def keep_buffers_finite(module: nn.Module) -> Iterator[None]:
    """Restore buffers if a forward in the block makes one non-finite.

    Otherwise one non-finite input would make BatchNorm's running statistics non-finite for good. Elements that were
    non-finite before, like those of a mask of -inf, are ignored. Nothing waits for a GPU.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    after = {name: buffer for name, buffer in module.named_buffers() if name in before}
    pairs = [(now, before[name]) for name, now in after.items() if now.shape == before[name].shape]
    numbers = [pair for pair in pairs if takes_gradient(pair[0])]
    if not numbers:
        return
    with torch.no_grad():
        now, then = (torch.cat([buffer.flatten() for buffer in side]) for side in zip(*numbers, strict=True))
        fine = (now.isfinite() | ~then.isfinite()).all()
        if fine.device.type == "cpu" and fine:
            return
        for buffer, kept in pairs:
            # Through .data, as BatchNorm itself writes them: unseen by autograd, which keeps them for the backward.
            buffer.data.copy_(torch.where(fine, buffer, kept))


def _fault(tally: StepStats) -> str | None:
    numbers = tally.numbers()
    for name, figure in (("loss_sum", "the loss"), ("gradient_norm", f"the norm of {tally.gradient_of}")):
        if not math.isfinite(value := numbers.get(name, 0.0)):
            if name == "loss_sum" and tally.of_classes and numbers.get("num_classed") == 0:
                return f"no target of this update counts, so the loss is {value}"
            return f"{figure} is {value}"
    return None
