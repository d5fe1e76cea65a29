"""Micro-batches as the first stage takes them: on its device, in the run's dtype and memory format, checked."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from adl_dist.data import Loader, check_dataset
from adl_dist.engine import Batches
from adl_dist.errors import DataError
from adl_dist.stage import Precision
from adl_dist.transport.spec import TensorSpec
from adl_dist.transport.staging import to_device

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)


class DeviceLoader:
    """Loads a dataset for stage 0; yields (input on the device, target on the CPU)."""

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        name: str,
        *,
        seed: int,
        shuffle: bool,
        num_workers: int,
        device: torch.device,
        precision: Precision,
        min_samples: int = 1,
    ) -> None:
        """Open ``dataset``, the ``training`` or ``validation`` dataset by its ``name``.

        Raises:
            DataError: it is None, has fewer than ``min_samples``, or is not a map-style dataset.
        """
        if dataset is None:
            raise DataError(f"the {name} dataset is None on the rank that feeds the pipeline, rank 0; pass it there")
        check_dataset(dataset, name=name, min_samples=min_samples)
        pinned = device.type == "cuda"
        self._loader = Loader(dataset, seed=seed, shuffle=shuffle, num_workers=num_workers, pin_memory=pinned)
        self.num_samples = self._loader.num_samples
        self._device, self._precision, self._name = device, precision, name
        self._num_classes: int | None = None
        self._ignore_index = -100

    def expect_classes(self, loss_fn: Callable[[Tensor, Tensor], Tensor], num_outputs: int) -> None:
        """Check targets against the number of outputs from now on, if ``loss_fn`` wants class indices."""
        if isinstance(loss_fn, CLASS_LOSSES):
            self._num_classes, self._ignore_index = num_outputs, loss_fn.ignore_index

    def batches(self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0) -> Batches:
        """Yield micro-batches of ``sizes`` samples, from ``first_sample`` in the order of ``epoch`` on.

        Raises:
            DataError: a sample that cannot be loaded; a target that is no class, of which torch would only say so in
                the loss, two processes away.
        """
        batches = self._named(self._loader.batches(epoch, sizes, first_sample=first_sample))
        for micro_batch, (input_, target) in enumerate(batches):
            if self._num_classes is not None:
                self._check(target, self._num_classes, f"micro-batch {micro_batch} of epoch {epoch + 1}")
            if self._device.type != "cpu":
                # First, because a conversion on the CPU would leave the pinned memory that the copy needs; on a stream
                # of its own, to overlap with what is launched already.
                input_ = to_device(input_, self._device)
            dtype = self._precision.dtype
            input_, target = (x.to(dtype) if x.is_floating_point() else x for x in (input_, target))
            if self._precision.channels_last and input_.ndim == 4:
                input_ = input_.contiguous(memory_format=torch.channels_last)
            yield input_, target

    def _named(self, batches: Batches) -> Batches:
        try:
            yield from batches
        except DataError as error:
            named = DataError(f"{self._name} dataset: {error}")
            named.exit_code = error.exit_code
            raise named from error

    def seconds_to_load(self, micro_batch_size: int) -> float:
        """Return how long a micro-batch keeps the caller busy, the least of a few; 0 if workers load it."""
        if self._loader.num_workers:
            return 0.0
        times = min(4, self._loader.num_samples)
        sizes = [min(micro_batch_size, self._loader.num_samples // times)] * times
        seconds = []
        with closing(self.batches(0, sizes)) as batches:
            for _ in sizes:
                start = time.perf_counter()
                next(batches)
                seconds.append(time.perf_counter() - start)
        return min(seconds) * micro_batch_size / sizes[0]

    def _check(self, target: Tensor, num_classes: int, where: str) -> None:
        if target.is_floating_point() or target.ndim != 1:
            return  # class probabilities, or one class per pixel: the loss checks those
        wrong = (target != self._ignore_index) & ((target < 0) | (target >= num_classes))
        if bool(wrong.any()):
            raise DataError(
                f"{self._name} dataset: {where} has target {int(target[wrong][0])}, but the model has {num_classes} "
                f"outputs, so targets must be in [0, {num_classes}); set data.num_classes (model.num_classes) to the "
                "number of classes, or correct the targets"
            )


def common_sample(*loaders: DeviceLoader | None) -> tuple[Tensor, Tensor] | None:
    """Return input and target [1, ...] as all ``loaders`` give them to stage 0; None where no data is fed.

    Raises:
        DataError: they give samples of different shapes or dtypes.
    """
    samples = []
    for loader in loaders:
        if loader is not None:
            with closing(loader.batches(0, [1])) as batches:
                samples.append(next(batches))
    specs = [tuple(str(TensorSpec.of(tensor)) for tensor in sample) for sample in samples]
    if len(set(specs)) > 1:
        raise DataError(
            f"validation dataset: its samples are {' and '.join(specs[1])}, but those of the training dataset are "
            f"{' and '.join(specs[0])}; give both the same shape and dtype"
        )
    return samples[0] if samples else None
