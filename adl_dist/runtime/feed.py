"""Micro-batches as the first stage takes them: on its device, in the run's dtype and memory format, checked."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn

from adl_dist.data import Loader
from adl_dist.errors import DataError

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)


class Feed:
    """Wraps a :class:`Loader`; yields (input on the device, target on the CPU)."""

    def __init__(
        self, loader: Loader, *, device: torch.device, dtype: torch.dtype, channels_last: bool, name: str
    ) -> None:
        """Wrap ``loader``; ``name`` says which data it is, for messages."""
        self._loader, self._device, self._dtype, self._name = loader, device, dtype, name
        self._channels_last = channels_last
        self._num_classes: int | None = None
        self._ignore_index = -100

    def expect_classes(self, loss_fn: Callable[[Tensor, Tensor], Tensor], num_outputs: int) -> None:
        """Check targets against the number of outputs from now on, if ``loss_fn`` wants class indices."""
        if isinstance(loss_fn, CLASS_LOSSES):
            self._num_classes, self._ignore_index = num_outputs, loss_fn.ignore_index

    def batches(
        self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield micro-batches of ``sizes`` samples, from ``first_sample`` in the order of ``epoch`` on.

        Raises:
            DataError: a target that is no class; torch would only say so in the loss, two processes away.
        """
        for micro_batch, (input_, target) in enumerate(self._loader.batches(epoch, sizes, first_sample=first_sample)):
            if self._num_classes is not None:
                self._check(target, self._num_classes, f"micro-batch {micro_batch} of epoch {epoch}")
            if input_.is_floating_point():
                input_ = input_.to(self._dtype)
            if target.is_floating_point():
                target = target.to(self._dtype)
            if self._channels_last and input_.ndim == 4:
                input_ = input_.contiguous(memory_format=torch.channels_last)
            yield input_.to(self._device, non_blocking=True), target

    def _check(self, target: Tensor, num_classes: int, where: str) -> None:
        if target.is_floating_point() or target.ndim != 1:
            return  # class probabilities, or one class per pixel: the loss checks those
        wrong = (target != self._ignore_index) & ((target < 0) | (target >= num_classes))
        if bool(wrong.any()):
            raise DataError(
                f"{self._name}: {where} has target {int(target[wrong][0])}, but the model has {num_classes} outputs, "
                f"so targets must be in [0, {num_classes}); set "
                "data.num_classes (model.num_classes) to the number of classes, or mend the targets"
            )
