"""Micro-batches as the first stage takes them: on its device, in the run's dtype and memory format, checked."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from adl_dist.data import Loader, check_dataset
from adl_dist.errors import DataError
from adl_dist.stage import Precision
from adl_dist.transport import TensorSpec
from adl_dist.transport.staging import to_device

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)


class DeviceLoader:
    """Wraps a :class:`Loader`; yields (input on the device, target on the CPU)."""

    def __init__(self, loader: Loader, *, device: torch.device, precision: Precision, name: str) -> None:
        """Wrap ``loader``; ``name`` says which data it is, for messages."""
        self._loader, self._device, self._precision, self._name = loader, device, precision, name
        self._num_classes: int | None = None
        self._ignore_index = -100

    @property
    def num_samples(self) -> int:
        """The number of samples of the dataset."""
        return self._loader.num_samples

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
            # To the device first: a conversion on the CPU would leave the pinned memory that the copy needs.
            input_ = self._on_device(input_)
            if input_.is_floating_point():
                input_ = input_.to(self._precision.dtype)
            if target.is_floating_point():
                target = target.to(self._precision.dtype)
            if self._precision.channels_last and input_.ndim == 4:
                input_ = input_.contiguous(memory_format=torch.channels_last)
            yield input_, target

    def _on_device(self, input_: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return input_
        # On a stream of its own the copy overlaps with what is launched already, instead of coming after it.
        return to_device(input_, self._device)

    def seconds_to_load(self, micro_batch_size: int) -> float:
        """Return how long a micro-batch keeps the caller busy, the least of a few; 0 if workers load it."""
        if self._loader.num_workers:
            return 0.0
        times = min(4, self._loader.num_samples)
        sizes = [min(micro_batch_size, self._loader.num_samples // times)] * times
        seconds, batches = [], self.batches(0, sizes)
        for _ in sizes:
            start = time.perf_counter()
            next(batches)
            seconds.append(time.perf_counter() - start)
        batches.close()
        return min(seconds) * micro_batch_size / sizes[0]

    def _check(self, target: Tensor, num_classes: int, where: str) -> None:
        if target.is_floating_point() or target.ndim != 1:
            return  # class probabilities, or one class per pixel: the loss checks those
        wrong = (target != self._ignore_index) & ((target < 0) | (target >= num_classes))
        if bool(wrong.any()):
            raise DataError(
                f"{self._name}: {where} has target {int(target[wrong][0])}, but the model has {num_classes} outputs, "
                f"so targets must be in [0, {num_classes}); set "
                "data.num_classes (model.num_classes) to the number of classes, or correct the targets"
            )


def make_loader(
    dataset: Dataset[Any] | None,
    name: str,
    *,
    seed: int,
    shuffle: bool,
    num_workers: int,
    device: torch.device,
    precision: Precision,
    min_samples: int = 1,
) -> DeviceLoader:
    """Build the source of micro-batches of ``dataset``.

    Args:
        dataset: map-style, of (input, target).
        name: for messages: ``training`` or ``validation``.
        seed: the run's seed.
        shuffle: see :class:`Loader`.
        num_workers: likewise.
        device: where the first stage computes.
        precision: decides the dtype of inputs and the memory format of images.
        min_samples: the fewest samples that will do.

    Raises:
        DataError: there is none, it is too small, or no dataset.
    """
    if dataset is None:
        raise DataError(f"the {name} dataset is None on the rank that feeds the pipeline, rank 0; pass it there")
    check_dataset(dataset, name=name, min_samples=min_samples)
    pinned = device.type == "cuda"
    loader = Loader(dataset, seed=seed, shuffle=shuffle, num_workers=num_workers, pin_memory=pinned)
    return DeviceLoader(loader, device=device, precision=precision, name=f"{name} dataset")


def common_sample(train_loader: DeviceLoader | None, val_loader: DeviceLoader | None) -> tuple[Tensor, Tensor] | None:
    """Return a sample as both datasets give it, for the agreement on shapes; None where no data is fed."""
    samples = [sample for feed in (train_loader, val_loader) if (sample := _first_sample(feed)) is not None]
    specs = [tuple(str(TensorSpec.of(tensor)) for tensor in sample) for sample in samples]
    if len(set(specs)) > 1:
        raise DataError(
            f"validation dataset: its samples are {' and '.join(specs[1])}, but those of the training dataset are "
            f"{' and '.join(specs[0])}; give both the same shape and dtype"
        )
    return samples[0] if samples else None


def _first_sample(feed: DeviceLoader | None) -> tuple[Tensor, Tensor] | None:
    """Return input and target of one sample as stage 0 will get them."""
    if feed is None:
        return None
    batches = feed.batches(0, [1])
    try:
        return next(batches)
    finally:
        batches.close()
